"""Opens GGUF files safely."""

from contextlib import suppress
from pathlib import Path
from struct import Struct, pack
from typing import Any

import numpy as np

from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.storage.files import check_regular

try:
    import gguf
except ImportError as error:
    raise RotationZooError("gguf is not installed", hint="run: pip install 'gguf>=0.17'") from error

__all__ = ["Reader", "gguf", "open_gguf", "write_header"]
_MOST_ELEMENTS = 3 << 19  # of all lists; the largest vocabularies with merges have 1.3 million
# Bytes of a text, and of all texts: a template has 20,000, a vocabulary 8 million.
_LONGEST, _MOST_TEXT = 1 << 20, 1 << 25
_LONG = 1 << 10  # elements of a list; no model has more layers


class Reader(gguf.GGUFReader):
    """A memory-mapped file. Unlike the `gguf` package, this does not trust the header: it raises
    `ValueError` for a truncated file and for lists that are too long. Without `lists`, long lists
    are empty: a vocabulary takes seconds."""

    def __init__(self, path: Path, lists: bool = True):
        self.path, self._elements, self._text, self._lists = path, 0, 0, lists
        super().__init__(path)
        if int(self.alignment).bit_count() != 1:  # which gguf 0.17 lets pass
            raise ValueError(f"its alignment is {self.alignment}, which is not a power of two")
        if self.byte_order == "S":
            raise ValueError("its bytes are in the order of other machines")

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"it ends before its byte {end:,}: it is truncated")
        return super()._get(offset, dtype, count, override_order)

    def _count_text(self, length: int) -> None:
        self._text += length
        if length > _LONGEST or self._text > _MOST_TEXT:
            raise ValueError(f"it has a text above {_LONGEST:,} bytes, or {_MOST_TEXT:,} in total")

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.STRING:
            self._count_text(int(self._get(orig_offs, np.uint64)[0]))
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            self._elements += int(count[0])
            if kind == raw_type or self._elements > _MOST_ELEMENTS:
                raise ValueError(f"it has lists of lists, or above {_MOST_ELEMENTS:,} elements")
            if not self._lists and count[0] > _LONG:
                end = self._end_of_list(orig_offs + 12, int(kind[0]), int(count[0]))
                return end - orig_offs, [kind, np.zeros_like(count)], [], [raw_type]
        return super()._get_field_parts(orig_offs, raw_type)

    def _end_of_list(self, begin: int, kind: int, count: int) -> int:
        types: Any = self.gguf_scalar_to_np
        if kind != gguf.GGUFValueType.STRING:
            return begin + count * int(np.dtype(types[kind]).itemsize)
        data, length = memoryview(self.data.data), Struct("<Q")
        for _ in range(count):
            (size,) = length.unpack_from(data, begin)
            self._count_text(size)
            begin += length.size + size
        return begin

    def value(self, name: str) -> Any:
        """The value of a metadata field; None if it is missing or invalid."""
        with suppress(ValueError):
            if (field := self.get_field(name)) is not None:
                return field.contents()
        return None


def open_gguf(path: Path, lists: bool = True) -> Reader:
    """Open a file without reading tensors. Raises `RotationZooError` for an invalid one."""
    check_regular(path)
    try:
        with np.errstate(all="raise"):  # of offsets
            reader = Reader(path, lists)
    except Exception as error:  # the package fails in many ways
        problem = f"{path} is not a valid GGUF file: {first_sentence(error):.200}"
        raise RotationZooError(problem, "give a file that llama.cpp loads") from error
    if reader.value("split.count") not in (None, 0, 1):
        join = "join them first with: llama-gguf-split --merge"
        raise RotationZooError(f"{path} is one part of several", join)
    return reader


def write_header(reader: Reader, path: Path) -> None:
    """Write a file with the same metadata and empty tensors, for transformers to make a config."""
    fields = [each for each in reader.fields.values() if not each.name.startswith("GGUF.")]
    content = [b"GGUF", pack("<IQQ", 3, len(reader.tensors), len(fields))]
    content += [part.tobytes() for field in fields for part in field.parts]
    for name in (tensor.name.encode() for tensor in reader.tensors):
        content.append(pack(f"<Q{len(name)}sIQIQ", len(name), name, 1, 0, 0, 0))
    path.write_bytes(b"".join(content))
