"""A prefix on disk: what a cache holds of a prompt, for later runs that begin with it."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rotationzoo.cache.rotated_layer import RotatedLayer
from rotationzoo.cache.stream import Stream
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import files, strict_json

_KEY = "rotationzoo.cache"  # the description's name among a file's metadata
_DIGEST = "rotationzoo.sha256"  # of the description and of all tensors
_LAYOUT = 2  # of the blocks; before, codes, scales and offsets were tensors of their own
_HINT = "read the prompt again, and save the cache anew"
_STATE = re.compile(r"layers\.\d+\.state\.(conv|recurrent)_states\.\d+")
Tensors = dict[str, torch.Tensor]


_Count = Annotated[int, Field(ge=0)]


class _StreamCounts(strict_json.Strict):
    start: _Count
    tail_start: _Count
    first: _Count


class _LayerCounts(strict_json.Strict):
    columns: _Count
    streams: list[_StreamCounts]


class _Description(strict_json.Strict):
    layout: int = 1
    made_with: dict[str, Any]
    padding: list[_Count]
    layers: dict[str, _LayerCounts]


def write(
    path: Path, tensors: Tensors, layers: Mapping[int, RotatedLayer], made_with: dict[str, Any]
) -> None:
    """Write the tensors of a cache to a safetensors file, whole or not at all.

    `made_with` says what must be the same where the file is read: rotations, model, settings.
    Raises `RotationZooError` where the disk refuses.
    """
    counts = {str(index): _counts(layer) for index, layer in layers.items()}
    padding = next(iter(layers.values())).padding.starts
    description = {
        "layout": _LAYOUT,
        "made_with": made_with,
        "padding": padding,
        "layers": counts,
    }
    held = {name: _alone(tensor) for name, tensor in tensors.items()}
    text = json.dumps(description)
    metadata = {_KEY: text, _DIGEST: _digest(text, held)}
    partial = path.with_name(path.name + ".partial")
    try:
        with files.disk_errors(path, "give another path"):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(held, partial, metadata=metadata)
            os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


def read(
    path: Path, layers: Mapping[int, RotatedLayer], made_with: dict[str, Any], place: Any
) -> Tensors:
    """Fill empty layers with what a file holds, and return the tensors that belong to no stream.

    `place(index)` is the device and the type of a layer's keys and values. Raises
    `RotationZooError` for a file that is damaged, or that was made with something else.
    """
    # A link may lead to a file, but not to a pipe, which would be waited for.
    if files.size_of(Path(os.path.realpath(path))) is None:
        raise RotationZooError(f"there is no file {path}", hint="write one with cache.save")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get(_KEY)
            if text is None:
                raise RotationZooError(f"{path} holds no cache", hint="give a file of cache.save")
            content = strict_json.parse(text, str(path), _HINT)
            description = strict_json.validate(_Description, content, str(path), _HINT)
            if description.layout != _LAYOUT or _DIGEST not in metadata:
                raise RotationZooError(
                    f"{path} was written by another version of rotationzoo", hint=_HINT
                )
            _check_made_with(path, description.made_with, made_with)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise RotationZooError(f"{path} cannot be read: {error}", hint=_HINT) from error
    if _digest(text, tensors) != metadata[_DIGEST]:
        raise _damaged(path, "its content is not what was written")
    if description.layers.keys() != {str(index) for index in layers}:
        raise _damaged(path, "it has other layers than the model")
    for index, layer in layers.items():
        counts = description.layers[str(index)]
        device, dtype = place(index)
        try:
            _fill(layer, counts, tensors, device, dtype)
        except (KeyError, IndexError, ValueError) as error:
            raise _damaged(path, f"layer {index}: {error}") from error
        layer.padding.starts, layer.padding.settled = description.padding, True
    if unknown := [name for name in tensors if not _STATE.fullmatch(name)]:
        raise _damaged(path, f"nothing is stored under {unknown[0]}")
    return tensors


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU that shares its memory with no other, as safetensors wants it."""
    tensor = tensor.detach().cpu().contiguous()
    shares = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone() if shares else tensor


def _digest(description: str, tensors: Tensors) -> str:
    """sha256 of a file's description and of the bytes of all its tensors."""
    digest = hashlib.sha256(description.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        # numpy knows no bfloat16, so every type is read as bytes.
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _counts(layer: RotatedLayer) -> dict[str, Any]:
    streams = []
    for start, stream in zip(layer.starts, layer.streams, strict=True):
        counts = {"start": start, "tail_start": stream.tail_start, "first": stream.first}
        streams.append(counts)
    return {"columns": layer.columns, "streams": streams}


def _check_made_with(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise `RotationZooError` where the file was made with something else."""
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    if not differing:
        return
    name = differing[0]
    if name in ("model", "rotations"):
        raise RotationZooError(
            f"{path} holds a prefix of other {'weights' if name == 'model' else name} than these",
            hint=_HINT,
        )
    difference = f"with {name} = {theirs.get(name)}, and this cache has {ours[name]}"
    # A format is a dozen settings, and has no name here.
    if name == "codec":
        difference = "in another 2-bit format than that of this cache"
    raise RotationZooError(
        f"{path} holds a prefix stored {difference}", hint="make the cache with the same settings"
    )


def _fill(
    layer: RotatedLayer,
    counts: _LayerCounts,
    tensors: Tensors,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give an empty layer its streams. Takes their tensors out of `tensors`."""
    for number, stream_counts in enumerate(counts.streams):
        prefix = f"layers.{layer.index}.{number}."
        names = [name for name in tensors if name.startswith(prefix)]
        parts = {name.removeprefix(prefix): tensors.pop(name).to(device) for name in names}
        for name, part in parts.items():
            if name.endswith(("head", "tail")):
                parts[name] = part.to(dtype)
        storage = layer.storage.for_layer(layer.index, parts["key.tail"], parts["value.tail"])
        stream = Stream(storage, layer.index, parts["key.tail"], parts["value.tail"])
        stream.restore(parts, stream_counts.model_dump())
        if stream.length and stream_counts.start + stream.length != counts.columns:
            raise ValueError("the number of tokens is another")
        layer.streams.append(stream)
        layer.starts.append(stream_counts.start)
    layer.columns = counts.columns
    layer.device, layer.dtype = device, dtype
    layer.is_initialized = bool(layer.streams)


def _damaged(path: Path, reason: str) -> RotationZooError:
    return RotationZooError(f"{path} is damaged: {reason}", hint=_HINT)
