"""Opening a GGUF file safely, and copying it with tensors added."""

from pathlib import Path
from typing import Any

import numpy as np

from rotationzoo.engines.formats.gguf_header import check_header
from rotationzoo.engines.formats.reading import check_regular
from rotationzoo.errors import RotationZooError, first_sentence

NOTE = "rotationzoo."
"""The prefix of the metadata fields that an export adds."""


def gguf_package() -> Any:
    """The `gguf` package. Raises `RotationZooError` if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise RotationZooError(
            "gguf is not installed",
            hint="run: pip install 'gguf>=0.17'",
        ) from error
    return gguf


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` of a file whose header was checked.

    Raises `RotationZooError` unless it is a complete GGUF file.
    """
    package = gguf_package()
    check_regular(path)
    check_header(path, {kind.value: sizes for kind, sizes in package.GGML_QUANT_SIZES.items()})
    try:
        return package.GGUFReader(path)
    except OSError as error:
        raise RotationZooError(
            f"{path} cannot be read: {error.strerror}", hint="check the path"
        ) from error
    except Exception as error:  # the parser fails in many ways
        raise RotationZooError(
            f"{path} is no GGUF file: {error}", hint="give a file that llama.cpp loads"
        ) from error


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
