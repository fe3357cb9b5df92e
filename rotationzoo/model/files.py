"""A model's files in a folder: its JSON tables and its weights."""

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

from rotationzoo.errors import ModelUnavailable, RotationZooError
from rotationzoo.storage import files

MOST_LAYERS = 1024
"""No model has nearly as many layers. A file that claims more only wastes time and memory."""
_INDEX = "model.safetensors.index.json"
_CONFIG_LIMIT = 16 << 20  # bytes; the largest published ones have 2 MB, most of it added tokens
_CONFIGS = ("*config.json", "*.jinja")
_COUNT = re.compile(r"(layers|n_layer|depth|blocks)$")  # keys that count layers, of any part
_SIZE = re.compile("num_(hidden_layers|(attention|key_value)_heads)|head_dim|(hidden|vocab)_size")
_JSON_LIMIT = 256 << 20  # bytes; the index of a mixture of experts has a line for each tensor
_END = 256  # bytes
_NO_MODEL = "do not use it: this is no config of a model"


def read_json(path: Path) -> dict[str, Any]:
    """Read a table from a model's file; empty where there is no readable table. The file may be a
    link, as in the hub's cache."""
    try:
        content = json.loads(files.read(Path(os.path.realpath(path)), _JSON_LIMIT))
    except (RotationZooError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_configs(folder: Path, name: str) -> None:
    """Raise `ModelUnavailable` for a config or a chat template of more than 16 MiB, and for a
    config of more than 1,024 layers: transformers takes both at their word."""
    for path in (path for pattern in _CONFIGS for path in folder.glob(pattern)):
        if path.is_file() and (size := path.stat().st_size) > _CONFIG_LIMIT:
            raise ModelUnavailable(
                f"{path.name} of {name} has {size:,} bytes, and no such file has more than "
                f"{_CONFIG_LIMIT:,}",
                hint=_NO_MODEL,
            )
    tables: list[dict[str, Any]] = [read_json(folder / "config.json")]
    for table in tables:  # which grows by the tables in it
        for key, value in table.items():
            if isinstance(value, dict):
                tables.append(value)
            elif isinstance(value, int) and _COUNT.search(key):
                check_count(value, name)
            if _SIZE.fullmatch(key) and isinstance(value, int) and value < 1:
                raise ModelUnavailable(f"{name} has {key} {value} in its config", hint=_NO_MODEL)


def check_count(layers: int, name: str) -> None:
    """Raise `ModelUnavailable` for more layers than any model has."""
    if layers > MOST_LAYERS:
        raise ModelUnavailable(
            f"the config of {name} asks for {layers:,} layers, and no model has more than "
            f"{MOST_LAYERS:,}",
            hint=_NO_MODEL,
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` reads: a single file, or the shards that the
    index names. The list is empty unless all of them are present. Raises `ModelUnavailable` for an
    index that names anything but files in the folder."""
    index = folder / _INDEX
    names = _shards(index) if index.is_file() else ["model.safetensors"]
    paths = [folder / name for name in names]
    complete = all(path.is_file() for path in paths)
    return paths if complete else []


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a `config.json` that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def indexed_bytes(folder: Path) -> int | None:
    """The bytes of all weights by the index of their files; None where there is none that says."""
    metadata = read_json(folder / _INDEX).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(size) if isinstance(size, int | float) and 0 < size < 1 << 60 else None


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
