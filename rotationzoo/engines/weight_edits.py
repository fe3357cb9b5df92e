"""In-place edits of parameters in copied safetensors files, with only one tensor in memory."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.model.files import weight_files
from rotationzoo.model.source import Source

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


Transform = Callable[[torch.Tensor], torch.Tensor]
"""Takes a parameter in float64, and returns it changed, in the same shape."""


@dataclass(frozen=True)
class Change:
    """What happens to one parameter."""

    shape: torch.Size
    transform: Transform

    def then(self, other: "Change") -> "Change":
        """This change followed by another one of the same parameter."""
        return Change(self.shape, lambda tensor: other.transform(self.transform(tensor)))


def multiply_rows(matrix: torch.Tensor, first_row: int = 0) -> Transform:
    """Multiply what a projection computes for each head by a matrix: rows `x` become `x @ matrix`.

    `matrix`: `[H, D, D]` float64. The parameter is a weight `[H D, in]` or a bias `[H D]`, or has
    these rows from `first_row` on.
    """
    heads, dim, _ = matrix.shape
    rows = slice(first_row, first_row + heads * dim)

    def transform(tensor: torch.Tensor) -> torch.Tensor:
        of_heads = tensor[rows].reshape(heads, dim, *tensor.shape[1:])
        changed = tensor.clone()
        changed[rows] = torch.einsum("hij,hi...->hj...", matrix, of_heads).flatten(0, 1)
        return changed

    return transform


def multiply_columns(matrix: torch.Tensor) -> Transform:
    """Multiply what a projection reads of each head by a matrix, which then stands between the two:
    `x @ weight^T` becomes `x @ matrix @ weight^T`.

    `matrix`: `[H, D, D]` float64. The parameter is a weight `[out, H D]`.
    """
    by_rows = multiply_rows(matrix.mT)
    return lambda tensor: by_rows(tensor.mT).mT


def scale_rows(factors: torch.Tensor, offset: float = 0.0) -> Transform:
    """Multiply the rows of a weight or a bias by factors, float64, after adding an offset that is
    taken off again: norms that multiply by `1 + weight` have an offset of 1."""

    def transform(tensor: torch.Tensor) -> torch.Tensor:
        column = factors.view(-1, *[1] * (tensor.ndim - 1))
        if factors.numel() != len(tensor):  # a factor for each element
            column = factors.view(tensor.shape)
        return (tensor + offset) * column - offset

    return transform


@dataclass(frozen=True)
class Place:
    """Where a parameter's data is."""

    file: Path
    begin: int
    """The offset in bytes from the beginning of the file."""
    dtype: torch.dtype


@dataclass(frozen=True)
class _Entry:
    """A tensor's entry in the header of a safetensors file."""

    file: Path
    data_begin: int
    header: Mapping[str, Any]


def find_places(source: Source, changes: Mapping[str, Change]) -> dict[str, Place]:
    """The place of each parameter.

    Raises `RotationZooError` if a parameter does not have exactly one tensor, in floating point and
    of its shape.
    """
    entries: dict[str, _Entry] = {}
    for path in weight_files(source.folder):
        entries |= _read_entries(path)
    places = {}
    for parameter, change in changes.items():
        entry = _entry_of(parameter, entries)
        shape = list(change.shape)
        if (
            entry is None
            or entry.header.get("shape") != shape
            or entry.header["dtype"] not in _DTYPES
        ):
            raise RotationZooError(
                f"the weights of {source.name} have no {parameter} of shape {shape} in floating "
                "point",
                hint="write them again with transformers' save_pretrained, and give that folder",
            )
        begin = entry.data_begin + entry.header["data_offsets"][0]
        places[parameter] = Place(entry.file, begin, _DTYPES[entry.header["dtype"]])
    return places


def apply_change(path: Path, place: Place, change: Change) -> None:
    """Change one tensor in a copy of its file. It is computed in float64 and rounded once."""
    with path.open("r+b") as file:
        file.seek(place.begin)
        data = bytearray(file.read(change.shape.numel() * place.dtype.itemsize))
        tensor = torch.frombuffer(data, dtype=place.dtype).view(change.shape).double()
        result = change.transform(tensor).to(place.dtype).contiguous()
        file.seek(place.begin)
        file.write(result.view(torch.uint8).numpy().data)


def _read_entries(path: Path) -> dict[str, _Entry]:
    """Name -> entry. A safetensors file is an 8-byte header length, the JSON header, the data."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: _Entry(path, 8 + length, entry) for name, entry in header.items()}


def _entry_of(parameter: str, entries: Mapping[str, _Entry]) -> _Entry | None:
    """The one tensor in the checkpoint that is this parameter; None if none or several match.

    In the checkpoints of vision models, names may have another prefix, often made of the same words
    in another order.
    """
    if parameter in entries:
        return entries[parameter]
    # Compare names from `layers.` on, since only what comes before it may differ.
    ending = "." + parameter[max(parameter.rfind("layers."), 0) :]
    names = [name for name in entries if f".{name}".endswith(ending)]
    words = sorted(parameter.split("."))
    names = [name for name in names if sorted(name.split(".")) == words] or names
    return entries[names[0]] if len(names) == 1 else None
