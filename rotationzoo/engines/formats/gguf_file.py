"""Opening a GGUF file safely, and copying it with tensors added.

The gguf package reads as much as a header asks for, and makes an object of every list element, so a
hostile header could exhaust memory. The header is validated before: every count and size must fit
in the file.

The layout follows ggml's docs/gguf.md: `magic, version, tensors, fields; fields: name, type, value;
tensors: name, dimensions, type, offset`. Strings and lists begin with their length.
"""

import dataclasses
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rotationzoo.engines.formats.reading import check_regular
from rotationzoo.errors import RotationZooError, first_sentence

# Scalar type of a field -> bytes per value.
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
# The limit for all lists together. The largest vocabularies and their merges have 1.3 million.
_MOST_ELEMENTS = 1 << 22
_MOST_DIMENSIONS, _LONGEST_NAME = 4, 1 << 16  # ggml's limit, and the specification's for keys
# The fewest bytes that a field can take (length of its name, type, one byte of value), and a tensor
# (length of its name, number of dimensions, one dimension, type, offset).
_LEAST_FIELD, _LEAST_TENSOR = 13, 32


def check_header(path: Path, sizes: dict[int, tuple[int, int]]) -> None:
    """Raise `RotationZooError` unless `path` is a GGUF file that holds all that its header claims.

    `sizes` maps each tensor type to the elements and the bytes of one of its blocks.
    """
    with _gguf_errors(path, ValueError, struct.error), path.open("rb") as file:
        _Walk(file, path.stat().st_size, sizes).check_all()


@contextmanager
def _gguf_errors(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, and of the disk, into one sentence about a file."""
    try:
        yield
    except OSError as error:
        raise RotationZooError(
            f"{path} cannot be read: {error.strerror}", hint="check the path"
        ) from error
    except kinds as error:
        raise RotationZooError(
            f"{path} is no GGUF file: {error}", hint="give a file that llama.cpp loads"
        ) from error


@dataclass
class _Walk:
    """One pass over a header. Every problem raises `ValueError`."""

    file: BinaryIO
    size: int
    sizes: dict[int, tuple[int, int]]
    order: str = "<"
    """The byte order in the notation of `struct`."""
    elements: int = 0
    """How many elements all lists have so far."""
    alignment: int = 32
    ends: list[int] = dataclasses.field(default_factory=list)
    """Where each tensor ends, in bytes from the start of the tensor data."""

    def check_all(self) -> None:
        """Check the magic number, the fields and the tensors, and that the file is long enough."""
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version & 0xFFFF == 0:  # the file has the other byte order
            self.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, and 2 and 3 are read")
        tensors, fields = self._number("Q"), self._number("Q")
        for _ in range(self._fitting(fields, _LEAST_FIELD)):
            name = self._string(_LONGEST_NAME)
            kind = self._number("I")
            if name == b"general.alignment" and kind == _UINT32:
                self.alignment = self._number("I")
            else:
                self._skip_value(kind)
        for _ in range(self._fitting(tensors, _LEAST_TENSOR)):
            self._tensor()
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"its alignment is {self.alignment}, and no power of two")
        # Tensor data begins at the next multiple of the alignment.
        start = -(-self.file.tell() // self.alignment) * self.alignment
        end = start + max(self.ends, default=0)
        if self.ends and end > self.size:
            raise ValueError(
                f"its tensors end at byte {end:,}, and it has {self.size:,}: it was cut off"
            )

    def _tensor(self) -> None:
        self._string(_LONGEST_NAME)
        dimensions = self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of it has {dimensions:,} dimensions")
        elements = 1
        for _ in range(dimensions):
            elements *= self._number("Q")
        kind, offset = self._number("I"), self._number("Q")
        if kind not in self.sizes:
            raise ValueError(f"a tensor of it is of type {kind}, which is not known here")
        block_elements, block_bytes = self.sizes[kind]
        blocks = -(-elements // block_elements)
        self.ends.append(offset + blocks * block_bytes)

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._string(self.size)
        elif kind in _SCALARS:
            self._bytes(_SCALARS[kind])
        elif kind == _ARRAY:
            self._skip_list()
        else:
            raise ValueError(f"a field of it is of type {kind}, which is not known here")

    def _skip_list(self) -> None:
        kind, count = self._number("I"), self._number("Q")
        # A string takes at least the 8 bytes of its length.
        self.elements += self._fitting(count, _SCALARS.get(kind, 8))
        if self.elements > _MOST_ELEMENTS:
            raise ValueError(f"its lists have more than {_MOST_ELEMENTS:,} elements")
        if kind == _STRING:
            for _ in range(count):
                self._string(self.size)
        elif kind in _SCALARS:
            self.file.seek(self._fitting(count * _SCALARS[kind], 1), 1)
        else:
            raise ValueError(f"a list of it is of type {kind}, which is not known here")

    def _fitting(self, count: int, least: int) -> int:
        """The count, if the rest of the file can hold that many items of at least `least` bytes.

        Raises `ValueError` otherwise.
        """
        if count * least > self.size - self.file.tell():
            raise ValueError(f"it asks for {count:,} elements, and has {self.size:,} bytes")
        return count

    def _string(self, longest: int) -> bytes:
        length = self._number("Q")
        if length > longest:
            raise ValueError(f"it asks for a text of {length:,} bytes")
        return self._bytes(self._fitting(length, 1))

    def _number(self, kind: str) -> Any:
        return struct.unpack(self.order + kind, self._bytes(struct.calcsize(kind)))[0]

    def _bytes(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) != count:
            raise ValueError("it ends in its header: it was cut off")
        return data


NOTE = "rotationzoo."
"""The prefix of the metadata fields that an export adds."""


def gguf_package() -> Any:
    """The `gguf` package. Raises `RotationZooError` if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise RotationZooError(
            "gguf is not installed", hint="run: pip install 'gguf>=0.17'"
        ) from error
    return gguf


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` of a file whose header was checked.

    Raises `RotationZooError` unless it is a complete GGUF file.
    """
    package = gguf_package()
    check_regular(path)
    check_header(path, {kind.value: sizes for kind, sizes in package.GGML_QUANT_SIZES.items()})
    with _gguf_errors(path, Exception):  # the parser fails in many ways
        return package.GGUFReader(path)


def read_field(reader: Any, name: str) -> Any:
    """The value of a metadata field; None if it is missing or unreadable."""
    field = reader.get_field(name)
    try:
        return None if field is None else field.contents()
    except (ValueError, IndexError):
        return None


def write_copy(
    reader: Any,
    architecture: str,
    path: Path,
    tensors: dict[str, np.ndarray],
    notes: dict[str, Any],
) -> None:
    """Write a copy of the opened file to `path`, with tensors and notes added.

    Everything else stays as it was. Raises `RotationZooError` for metadata that cannot be copied.
    """
    writer = gguf_package().GGUFWriter(path, architecture, endianess=reader.endianess)
    try:
        _copy_fields(reader, writer)
        for name, note in notes.items():
            if isinstance(note, bool):
                writer.add_bool(f"{NOTE}{name}", note)
            else:
                writer.add_string(f"{NOTE}{name}", str(note))
        _write_tensors(reader, writer, tensors)
    except (ValueError, TypeError, IndexError) as error:
        # The package can read empty lists and invalid text, but it cannot write them.
        raise RotationZooError(
            f"the base model's metadata cannot be copied: {first_sentence(error)}"
        ) from error
    finally:
        writer.close()


def _copy_fields(reader: Any, writer: Any) -> None:
    package = gguf_package()
    writer.data_alignment = reader.alignment
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith(("GGUF.", NOTE)):
            continue  # the writer adds its own, and an earlier export's notes are dropped
        kind = field.types[0]
        inner = field.types[-1] if kind == package.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)


def _write_tensors(reader: Any, writer: Any, tensors: dict[str, np.ndarray]) -> None:
    """Write all tensors: first the names and shapes of all of them, then their data."""
    for tensor in reader.tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    for name, matrix in tensors.items():
        writer.add_tensor_info(name, matrix.shape, matrix.dtype, matrix.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
    for matrix in tensors.values():
        writer.write_tensor_data(matrix)
