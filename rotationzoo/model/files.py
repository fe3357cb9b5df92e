"""A model's files in a folder: its JSON tables and its weights."""

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rotationzoo.codec.engine_needs import ENGINES
from rotationzoo.errors import ModelUnavailable, RotationZooError, as_unavailable
from rotationzoo.storage import files
from rotationzoo.storage.files import read_json

MOST_LAYERS = 1024
"""More than any model has. A file that claims more only wastes time and memory."""
INDEX = "model.safetensors.index.json"
GGUF = "weights.gguf"  # the link to a GGUF file, in the folder that stands for it (`model/source`)
SINGLE, _SHARDS = "model.safetensors", "model-*-of-*.safetensors"
_CONFIG_LIMIT = 16 << 20  # bytes; the largest published ones have 2 MB, most of it added tokens
_CONFIGS = ("*config.json", "*.jinja")
_HEADER_LIMIT = 100_000_000  # bytes, as in safetensors
_COUNT = re.compile(r"(layers|n_layer|depth|blocks)$")  # keys that count layers, of any part
_SIZE = re.compile("num_(hidden_layers|(attention|key_value)_heads)|head_dim|(hidden|vocab)_size")
_END = 256  # bytes
# An adapter and a distributed checkpoint, which transformers would load too, or instead.
_OTHER_WEIGHTS = ("adapter_config.json", "shard-*-model-*-of-*.safetensors")
ORIGINAL = "give the model that it was converted from"
_NO_MODEL = "do not use it: this is not the config of a model"


def check_configs(folder: Path, name: str) -> None:
    """Raise `ModelUnavailable` for a config or a chat template of more than 16 MiB, and for a
    config with more than 1,024 layers or sizes below 1: transformers checks neither."""
    for path in (path for pattern in _CONFIGS for path in folder.glob(pattern)):
        if path.is_file() and (size := path.stat().st_size) > _CONFIG_LIMIT:
            problem = f"{path.name} of {name} has {size:,} bytes, more than {_CONFIG_LIMIT:,}"
            raise ModelUnavailable(problem, _NO_MODEL)
    tables: list[dict[str, Any]] = [read_json(folder / "config.json")]
    for table in tables:  # the loop appends nested tables
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
        problem = f"the config of {name} asks for {layers:,} layers, more than {MOST_LAYERS:,}"
        raise ModelUnavailable(problem, _NO_MODEL)


def weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights: one safetensors file, the shards in the index (none unless
    all are present), or a GGUF file. Raises `ModelUnavailable` if other files would be loaded."""
    for other in chain.from_iterable(map(folder.glob, _OTHER_WEIGHTS)):
        problem = f"{folder} also holds {other.name}, and transformers would load that"
        hint = "remove it, or merge it by peft's merge_and_unload and save the model elsewhere"
        raise ModelUnavailable(problem, hint)
    if is_gguf(folder):
        return [folder / GGUF]
    single, shards = folder / SINGLE, sorted(filter(Path.is_file, folder.glob(_SHARDS)))
    if not single.is_file():
        paths = [folder / name for name in _named_shards(folder / INDEX)]
        return paths if all(map(Path.is_file, paths)) else []
    # Servers load the files in the index, or all files without one.
    if shards and not tensor_ends(shards).items() <= tensor_ends([single]).items():
        both = f"{SINGLE}, which transformers loads, and {shards[0].name}, which a server loads"
        hint = "remove the one that is not the model's"
        raise ModelUnavailable(f"{folder} holds two sets of weights: {both}", hint)
    return [single]


def is_gguf(folder: Path) -> bool:
    """Whether a folder stands for a GGUF file, whose weights are dequantized to be loaded."""
    return (folder / GGUF).is_file()


def check_engine(folder: Path, engine: str) -> None:
    """Raise `RotationZooError` for a GGUF file if the engine cannot read it."""
    if is_gguf(folder) and not ENGINES[engine].gguf:
        able = ", ".join(name for name, row in ENGINES.items() if row.gguf)
        hint = f"{ORIGINAL}; engines that can use it: {able}"
        raise RotationZooError(f"{engine} cannot use a GGUF file", hint)


def absent_weights(folder: Path) -> tuple[str, str] | None:
    """A missing file of the folder's weights, and the reason; None if it has no weights."""
    named, shards = _named_shards(folder / INDEX), [path.name for path in folder.glob(_SHARDS)]
    absent = [name for name in named if not (folder / name).is_file()]
    if absent and set(shards) <= set(named):
        return absent[0], f"which {INDEX} names"
    other = f"one that names {absent[0]}" if absent else "none"
    return (f"the {INDEX} of its shards", f"and has {other}") if shards else None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a `config.json` that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def indexed_bytes(folder: Path) -> int | None:
    """The size of all weights in bytes, from the index of their files; None if it is not there."""
    metadata = read_json(folder / INDEX).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(size) if isinstance(size, int | float) and 0 < size < 1 << 60 else None


@dataclass(frozen=True)
class Stored:
    """A tensor in a file of weights, from the byte `begin` to `end`."""

    file: Path
    begin: int
    end: int
    dtype: str
    shape: list[int]


def read_headers(paths: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of files by name. Raises `ModelUnavailable` for a malformed file."""
    tensors = {}
    for path in paths:
        if path.name == GGUF:
            from rotationzoo.storage.gguf_reader import open_gguf

            for each in open_gguf(path, lists=False).tensors:
                begin, shape = int(each.data_offset), each.shape.tolist()
                end, dtype = begin + int(each.n_bytes), each.tensor_type.name
                tensors[each.name] = Stored(path, begin, end, dtype, shape)
            continue
        broken = as_unavailable(f"{path} is not a safetensors file", hint="fetch the weights again")
        with broken, path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(path.stat().st_size, _HEADER_LIMIT):
                raise ValueError(f"its header is longer than the file, or than {_HEADER_LIMIT:,}")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                if end > path.stat().st_size:
                    raise ValueError("it was cut off before its end")
                tensors[name] = Stored(path, begin, end, entry["dtype"], entry["shape"])
    return tensors


def tensor_ends(paths: Iterable[Path]) -> dict[str, bytes]:
    """Name -> name, type, shape and the first and last 256 bytes of each tensor in files."""
    ends = {}
    for name, stored in read_headers(paths).items():
        sample = b""
        with stored.file.open("rb") as file:
            for position in (stored.begin, max(stored.begin, stored.end - _END)):
                file.seek(position)
                sample += file.read(min(_END, stored.end - position))
        ends[name] = f"{name} {stored.dtype} {stored.shape} ".encode() + sample
    return ends


def _named_shards(index: Path) -> list[str]:
    """The shards in an index; none without an index."""
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    try:
        return sorted({files.plain(str(name)) for name in names})
    except ValueError as error:
        raise ModelUnavailable(f"{index} is damaged: {error}", "fetch the weights again") from error
