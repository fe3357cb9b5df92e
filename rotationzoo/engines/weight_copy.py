"""Copying a model with some of its parameters changed: whole or not at all, with one tensor in
memory at a time."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from rotationzoo.artifact.weights import RECORD
from rotationzoo.engines.weight_edits import Change, apply_change, find_places
from rotationzoo.errors import RotationZooError
from rotationzoo.model.files import weight_files
from rotationzoo.model.source import Source
from rotationzoo.progress import Progress
from rotationzoo.storage.files import disk_errors
from rotationzoo.storage.folders import install, temporary_sibling

_INDEX = "model.safetensors.index.json"
# Endings of weight files. Only the model's own safetensors files are copied, with the changes; any
# others would lack them, so they are left out.
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)


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
    files = [*_files_beside_weights(source.folder), *weight_files(source.folder)]
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
            for name, place in places.items():
                if place.file == path:
                    apply_change(copy, place, changes[name])
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
    paths = [
        path for path in folder.iterdir() if path.name == _INDEX or not path.name.endswith(_WEIGHTS)
    ]
    for path in paths:
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in allowed):
            raise RotationZooError(
                f"{path} leads out of its folder by a symbolic link",
                hint="remove it, or put the file itself there",
            )
    return [path for path in paths if path.is_file()]
