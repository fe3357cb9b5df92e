"""Checks that a base GGUF file was converted from the artifact's model.

It must have the layers, heads and dimensions of the artifact: with others the rotations would fail
to load, or load for the wrong layers. The numbers of its config are compared with the model's, if
the model is on this machine. A base of other weights would not fail with the rotations; it would
only answer worse.
"""

import math
import re
from pathlib import Path
from typing import Any

import huggingface_hub

from rotationzoo.artifact.manifest import hash_config
from rotationzoo.engines.base import Payload
from rotationzoo.engines.formats.gguf_file import read_field
from rotationzoo.engines.formats.gguf_rotations import ROTATION_NAME
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import cached_layers
from rotationzoo.model.files import text_config
from rotationzoo.model.source import Source, find
from rotationzoo.storage.files import read_json

_HINT = "give the base that was converted from the model of the artifact"
_KEYS = re.compile(r"blk\.(\d+)\.attn_k\.weight")
# GGUF field -> key of config.json.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "rope.freq_base": "rope_theta",
}


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
    for name in tensors:
        if ROTATION_NAME.fullmatch(name):
            raise RotationZooError(
                f"{base.name} has rotations already ({name})",
                hint="start from the file without them",
            )
    problem = _layer_problem(tensors, payload) or _row_problem(tensors, payload)
    if problem is not None:
        raise RotationZooError(f"{base.name} is no model of this artifact: {problem}", hint=_HINT)


def _layer_problem(tensors: dict[str, Any], payload: Payload) -> str | None:
    """The first layer that has keys in the file alone, or in the artifact alone."""
    blocks = {int(match[1]) for match in map(_KEYS.fullmatch, tensors) if match}
    cached = {layer.index for layer in cached_layers(payload.geometry)}
    if missing := sorted(cached - blocks):
        return f"it has no keys in layer {missing[0]}, which has rotations here"
    # Layers that read another layer's cache may still have key projections, which are unused.
    shares = any(layer.owner != layer.index for layer in payload.geometry)
    if not shares and (others := sorted(blocks - cached)):
        return f"layer {others[0]} caches keys there, and has no rotation here"
    return None


def _row_problem(tensors: dict[str, Any], payload: Payload) -> str | None:
    """The first projection without one row per channel of every KV head."""
    for layer in cached_layers(payload.geometry):
        for projection in ("attn_k.weight", "attn_v.weight"):
            tensor = tensors.get(f"blk.{layer.index}.{projection}")
            if tensor is None:  # some layers of Gemma 4 use their keys as values
                continue
            # ggml lists input channels first.
            rows = int(tensor.shape[1]) if len(tensor.shape) == 2 else 0
            fits = rows == layer.kv_heads * layer.key_dim
            if payload.model is None:  # the number of heads is unknown
                fits = rows > 0 and rows % layer.key_dim == 0
            if not fits:
                return (
                    f"layer {layer.index} should have {layer.kv_heads} KV heads of "
                    f"{layer.key_dim}, and its {projection} has {rows} rows"
                )
    return None


def compare_base(reader: Any, base: Path, payload: Payload, model: str | None) -> str:
    """Compare the base with the config of its `model`, and return a note that says what was
    compared. Without a name, the model is looked for on this machine.

    Raises `RotationZooError` for a file that was converted from another model.
    """
    source = find(model) if model else _model_here(payload)
    if source is None:
        return (
            f"the base was compared by its shapes alone: {payload.model or 'its model'} was not "
            "found on this machine (--model says where it is)"
        )
    config_sha256 = hash_config(source.folder)
    if model and payload.provenance.get("config_sha256", config_sha256) != config_sha256:
        raise RotationZooError(
            f"{model} is not the model of this artifact: its config differs", hint="check --model"
        )
    config = text_config(read_json(source.folder / "config.json"))
    # Some configs keep `rope_theta` under `rope_parameters`.
    if isinstance(rope := config.get("rope_parameters"), dict):
        config = {**rope, **config}
    architecture = read_field(reader, "general.architecture")
    for field, key in _FIELDS.items():
        stored, expected = read_field(reader, f"{architecture}.{field}"), config.get(key)
        if not isinstance(stored, int | float) or not isinstance(expected, int | float):
            continue
        if not math.isclose(stored, expected, rel_tol=1e-6):
            raise RotationZooError(
                f"{base.name} was not converted from {source.name}: its {field} is {stored:g}, and "
                f"{key} is {expected:g} there",
                hint=_HINT,
            )
    return f"the base has the config of {source.name}; its weights were not compared"


def _model_here(payload: Payload) -> Source | None:
    """The artifact's model if it is already on this machine, else None. Nothing is fetched."""
    model = payload.model
    if model is None:
        return None
    if model == "demo":
        return find(model)
    revision = payload.provenance.get("model_revision")
    try:
        path = huggingface_hub.try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not a valid hub id
        return None
    return Source(model, Path(path).parent, revision) if isinstance(path, str) else None
