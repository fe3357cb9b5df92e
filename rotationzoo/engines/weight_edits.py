"""Copying a model with some of its parameters changed: whole or not at all, with one tensor in
memory at a time.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rotationzoo.artifact.tensor_check import DTYPES
from rotationzoo.errors import RotationZooError
from rotationzoo.model.absorbed import RECORD
from rotationzoo.model.files import Stored, entry_file, read_headers, weight_files
from rotationzoo.model.source import Source
from rotationzoo.progress import Progress
from rotationzoo.storage.files import disk_errors
from rotationzoo.storage.folders import install, temporary_sibling

_DTYPES = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}
Transform = Callable[..., torch.Tensor]
"""Takes a parameter in float64, and returns it changed, in the same shape. What a change `reads`
comes second."""


@dataclass(frozen=True)
class Change:
    """The change of one parameter."""

    shape: torch.Size
    transform: Transform
    reads: str | None = None
    """Another parameter that is changed, of which the transform gets what the model has."""


def multiply_rows(matrix: torch.Tensor) -> Transform:
    """Multiply what a projection computes for each head by a matrix: rows `x` become `x @ matrix`.

    `matrix`: `[H, D, D]` float64. The parameter is a weight `[H D, in]` or a bias `[H D]`.
    """

    def transform(tensor: torch.Tensor) -> torch.Tensor:
        of_heads = tensor.unflatten(0, matrix.shape[:2])
        return torch.einsum("hij,hi...->hj...", matrix, of_heads).flatten(0, 1)

    return transform


def multiply_columns(matrix: torch.Tensor) -> Transform:
    """Multiply what a projection reads of each head by a matrix, which then stands between the two:
    `x @ weight^T` becomes `x @ matrix @ weight^T`.

    `matrix`: `[H, D, D]` float64. The parameter is a weight `[out, H D]`.
    """
    by_rows = multiply_rows(matrix.mT)
    return lambda tensor: by_rows(tensor.mT).mT


def find_places(source: Source, changes: Mapping[str, Change]) -> dict[str, Stored]:
    """The place of each parameter.

    Raises `RotationZooError` if a parameter does not have exactly one tensor, in floating point and
    of its shape.
    """
    entries = read_headers(weight_files(source.folder))
    places = {}
    for parameter, change in changes.items():
        entry = _entry_of(parameter, entries)
        shape = list(change.shape)
        if entry is None or entry.shape != shape or entry.dtype not in _DTYPES:
            raise RotationZooError(
                f"the weights of {source.name} have no {parameter} of shape {shape} in floating "
                "point",
                hint="write them again with transformers' save_pretrained, and give that folder",
            )
        places[parameter] = entry
    return places


def apply_change(path: Path, place: Stored, change: Change, *others: torch.Tensor) -> None:
    """Change one tensor in a copy of its file. It is computed in float64 and rounded once."""
    tensor = read_tensor(path, place, change.shape)
    result = change.transform(tensor, *others).to(_DTYPES[place.dtype]).contiguous()
    with path.open("r+b") as file:
        file.seek(place.begin)
        file.write(result.view(torch.uint8).numpy().data)


def read_tensor(path: Path, place: Stored, shape: torch.Size) -> torch.Tensor:
    """A tensor in a file, or in a copy of it, in float64."""
    with path.open("rb") as file:
        file.seek(place.begin)
        data = bytearray(file.read(place.end - place.begin))
    return torch.frombuffer(data, dtype=_DTYPES[place.dtype]).view(shape).double()


def _entry_of(parameter: str, entries: Mapping[str, Stored]) -> Stored | None:
    """The entry of the one tensor that is this parameter; None if none or several match.

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


# Endings of weight files. Only the model's own safetensors files are copied, with the changes; any
# others would lack them, so they are left out.
_ENDINGS = ".safetensors .bin .pt .pth .ckpt .gguf .h5 .msgpack .onnx .index.json"


def write_changed_copy(
    source: Source,
    changes: Mapping[str, Change],
    record: Callable[[Source], bytes],
    output: Path,
    progress: Progress,
) -> None:
    """Copy a model to the folder `output`, with its parameters changed and a record of that.

    `record`: what the copy, which is not yet in its place, says about itself. Raises
    `RotationZooError` if there is such a folder by now, or the checkpoint lacks a parameter.
    """
    places = find_places(source, changes)
    files = sorted({*_files_beside_weights(source.folder), *weight_files(source.folder)})
    with disk_errors(output), temporary_sibling(output) as work:
        # Check again under the lock: fetching the weights took time.
        if output.exists():
            raise RotationZooError(
                f"{output} is there by now", hint="choose another place with --output"
            )
        for done, path in enumerate(files):
            progress("absorbing", done, len(files))
            copy = work / path.name
            shutil.copyfile(path, copy)
            for name in [name for name, place in places.items() if place.file == path]:
                others = []
                if (other := changes[name].reads) is not None:
                    beside = places[other]
                    others = [read_tensor(beside.file, beside, changes[other].shape)]
                apply_change(copy, places[name], changes[name], *others)
            copy.chmod(0o644)  # as for exports: the server may run as another user
        (work / RECORD).write_bytes(record(Source(source.name, work, None)))
        install(work, output)


def _files_beside_weights(folder: Path) -> list[Path]:
    """The files that are copied unchanged.

    Raises `RotationZooError` for a symbolic link that leads out of the folder: copies are
    published, and the link's target may be private. Links into the blobs of the hub's cache, which
    is made of links, are allowed.
    """
    blobs = folder.parent.parent / "blobs"
    allowed = [os.path.realpath(folder)]
    if not blobs.is_symlink():
        allowed.append(os.path.realpath(blobs))
    own = entry_file(weight_files(folder))
    weights = tuple(_ENDINGS.split())
    paths = [
        each for each in folder.iterdir() if not each.name.endswith(weights) or each.name == own
    ]
    for path in paths:
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in allowed):
            hint = "remove it, or put the file itself there"
            raise RotationZooError(f"{path} leads out of its folder by a symbolic link", hint)
    return [path for path in paths if path.is_file()]
