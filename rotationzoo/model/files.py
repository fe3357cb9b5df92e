"""A model's files in a folder: its JSON tables and its weights."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from rotationzoo.errors import ModelUnavailable, RotationZooError
from rotationzoo.storage import files

_JSON_LIMIT = 256 << 20  # bytes; the index of a mixture of experts has a line for each tensor
_END = 256  # bytes


def read_json(path: Path) -> dict[str, Any]:
    """Read a table from a model's file; empty where there is no readable table. The file may be a
    link, as in the hub's cache."""
    try:
        content = json.loads(files.read(Path(os.path.realpath(path)), _JSON_LIMIT))
    except (RotationZooError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` reads: a single file, or the shards that the
    index names. The list is empty unless all of them are present. Raises `ModelUnavailable` for an
    index that names anything but files in the folder."""
    index = folder / "model.safetensors.index.json"
    names = _shards(index) if index.is_file() else ["model.safetensors"]
    paths = [folder / name for name in names]
    complete = all(path.is_file() for path in paths)
    return paths if complete else []


def tensor_ends(path: Path) -> dict[str, bytes]:
    """Name -> name, type, shape and the first and last 256 bytes of each tensor in a safetensors
    file. A malformed file may raise any kind of error."""
    ends = {}
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            sample = b""
            # A tensor of less than 256 bytes is read twice, which does no harm.
            for position in (begin, max(begin, end - _END)):
                file.seek(position)
                sample += file.read(min(_END, end - position))
            ends[name] = f"{name} {entry['dtype']} {entry['shape']} ".encode() + sample
    return ends


def _shards(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    try:
        return sorted({files.plain(str(name)) for name in names})
    except ValueError as error:
        raise ModelUnavailable(
            f"{index} is damaged: {error}", hint="fetch the weights again"
        ) from error
