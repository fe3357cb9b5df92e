"""Checks that a base GGUF file has the layers, heads and dimensions of an artifact.

Any other file is refused: the rotations would fail to load, or load for the wrong layers.
"""

import re
from pathlib import Path
from typing import Any

from rotationzoo.engines.base import Payload
from rotationzoo.engines.formats.gguf_file import read_field
from rotationzoo.engines.formats.gguf_rotations import ROTATION_NAME
from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import Layer, cached_layers

CONVERTED_BASE = "give the base that was converted from the model of the artifact"
_KEYS = "blk.{}.attn_k.weight"
_VALUES = "blk.{}.attn_v.weight"
_LISTED = 8  # the most layers that an error message lists


def check_base(reader: Any, base: Path, payload: Payload) -> None:
    """Raise `RotationZooError` unless the file fits the artifact.

    The file must be in one part and have no rotations yet. It must cache keys in exactly the
    artifact's layers, with its heads and dimensions.
    """
    parts = read_field(reader, "split.count")
    if isinstance(parts, int) and parts > 1:
        raise RotationZooError(
            f"{base.name} is one part of several",
            hint="join them first with: llama-gguf-split --merge",
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _check_no_other_layers(base.name, tensors, payload)
    for name in tensors:
        if ROTATION_NAME.fullmatch(name):
            raise RotationZooError(
                f"{base.name} has rotations already ({name})",
                hint="start from the file without them",
            )
    _check_layers(base.name, tensors, payload)


def _check_no_other_layers(name: str, tensors: dict[str, Any], payload: Payload) -> None:
    """Raise `RotationZooError` for a layer that caches keys and has no rotation."""
    # Layers that read another layer's cache may still have key projections, which are unused.
    if any(layer.owner != layer.index for layer in payload.geometry):
        return
    matches = (re.fullmatch(r"blk\.(\d+)\.attn_k\.weight", tensor) for tensor in tensors)
    blocks = {int(match[1]) for match in matches if match}
    cached = {layer.index for layer in cached_layers(payload.geometry)}
    if others := sorted(blocks - cached):
        raise RotationZooError(
            f"{name} is no model of this artifact: layer {others[0]} caches keys there, and has no "
            "rotation here",
            hint=CONVERTED_BASE,
        )


def _check_layers(name: str, tensors: dict[str, Any], payload: Payload) -> None:
    layers = cached_layers(payload.geometry)
    missing = [layer.index for layer in layers if _KEYS.format(layer.index) not in tensors]
    if missing:
        noun = "layer" if len(missing) == 1 else "layers"
        listed = ", ".join(map(str, missing[:_LISTED]))
        if len(missing) > _LISTED:
            listed += ", ..."
        raise RotationZooError(
            f"{name} is no model of this artifact: it has no keys in {noun} {listed}, and the "
            "artifact has rotations for them",
            hint=CONVERTED_BASE,
        )
    for layer in layers:
        for pattern in (_KEYS, _VALUES):
            tensor = pattern.format(layer.index)
            if tensor in tensors:  # some layers of Gemma 4 use their keys as values
                _check_rows(name, tensors[tensor], layer, payload)


def _check_rows(name: str, tensor: Any, layer: Layer, payload: Payload) -> None:
    """Raise `RotationZooError` unless a projection has one row per channel of every KV head."""
    rows = int(tensor.shape[1]) if len(tensor.shape) == 2 else 0  # ggml lists input channels first
    fits = rows == layer.kv_heads * layer.key_dim
    if payload.model is None:  # the number of heads is unknown
        fits = rows > 0 and rows % layer.key_dim == 0
    if not fits:
        projection = tensor.name.split(".", 2)[2]
        raise RotationZooError(
            f"{name} is no model of this artifact: layer {layer.index} should have "
            f"{layer.kv_heads} KV heads of {layer.key_dim}, and its {projection} has {rows} rows",
            hint=CONVERTED_BASE,
        )
