"""Checks that a base GGUF file was converted from the artifact's model.

It must have the layers, heads and dimensions of the artifact: with others the rotations would fail
to load, or load for the wrong layers. Its config and some of its weights are compared with the
model's, as far as the model is on this machine. A base of other weights would not fail with the
rotations; it would only answer worse.
"""

import math
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from rotationzoo.engines.base import Options, Payload
from rotationzoo.engines.formats.gguf_file import gguf_package, read_field
from rotationzoo.engines.formats.gguf_rotations import ROTATION_NAME
from rotationzoo.errors import RotationZooError
from rotationzoo.model.files import read_json, weight_files
from rotationzoo.model.geometry import Layer, cached_layers
from rotationzoo.model.source import Source, config_hash, find

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


_ROWS = 256  # how many leading rows of the embedding are compared
# The largest relative error allowed for an embedding. It is about .1 for one quantized to 4 bits,
# and 1.4 for other weights.
_CONVERTED = 0.5
# The largest relative error allowed for norms, which converters keep in float32. It is 0, or 1e-3
# for norms that went through float16.
_SAME = 2e-3
# GGUF field -> key of config.json.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "rope.freq_base": "rope_theta",
}


def compare_base(options: Options, reader: Any, payload: Payload) -> str:
    """Compare the base with its model, and return a note that says what could be compared.

    Raises `RotationZooError` for a file that was converted from another model.
    """
    name = options.base.name if options.base else ""
    source = find(options.model) if options.model else _model_here(payload)
    if source is None:
        model = payload.model or "its model"
        return (
            f"the base was compared by its shapes alone: {model} was not found on this machine "
            "(--model says where it is)"
        )
    config_sha256 = config_hash(source)
    if options.model and payload.provenance.get("config_sha256", config_sha256) != config_sha256:
        raise RotationZooError(
            f"{options.model} is not the model of this artifact: its config differs",
            hint="check --model",
        )
    _check_config(name, reader, source)
    compared = _check_weights(name, reader, source)
    if not compared:
        return (
            f"the base was compared by its config alone: the weights of {source.name} are not on "
            "this machine"
        )
    return f"the base has the weights of {source.name}, as far as {', '.join(compared)} show"


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


def _check_config(name: str, reader: Any, source: Source) -> None:
    config = read_json(source.folder / "config.json")
    if isinstance(text_config := config.get("text_config"), dict):  # a vision model's text part
        config = text_config
    # Some configs keep `rope_theta` under `rope_parameters`.
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        config = {**rope, **config}
    architecture = reader.get_field("general.architecture").contents()
    for field, key in _FIELDS.items():
        entry = reader.get_field(f"{architecture}.{field}")
        stored = None if entry is None else entry.contents()
        expected = config.get(key)
        if not isinstance(stored, int | float) or not isinstance(expected, int | float):
            continue
        if not math.isclose(stored, expected, rel_tol=1e-6):
            raise RotationZooError(
                f"{name} was not converted from {source.name}: its {field} is {stored:g}, and "
                f"{key} is {expected:g} there",
                hint=CONVERTED_BASE,
            )


def _check_weights(name: str, reader: Any, source: Source) -> list[str]:
    """Compare the norms at both ends of the stack and the first rows of the embedding.

    Returns the names of the tensors that could be compared. Raises `RotationZooError` for one that
    differs.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    matches = (re.fullmatch(r"blk\.(\d{1,4})\.attn_norm\.weight", tensor) for tensor in tensors)
    last = max((int(match[1]) for match in matches if match), default=0)
    pairs = {
        "output_norm.weight": (".norm.weight", _SAME),
        "blk.0.attn_norm.weight": (".layers.0.input_layernorm.weight", _SAME),
        f"blk.{last}.attn_norm.weight": (f".layers.{last}.input_layernorm.weight", _SAME),
        "token_embd.weight": (".embed_tokens.weight", _CONVERTED),
    }
    compared = []
    for tensor, (ending, allowed) in pairs.items():
        original = _original_rows(source, ending)
        if original is None or tensor not in tensors:
            continue
        converted = _converted_rows(tensors[tensor])
        if converted is None:
            continue
        if converted.shape != original.shape:
            raise RotationZooError(
                f"{name} was not converted from {source.name}: its {tensor} is "
                f"{list(converted.shape)}, and {list(original.shape)} there",
                hint=CONVERTED_BASE,
            )
        error = _relative_error(converted, original, is_norm=allowed == _SAME)
        # `not <=` instead of `>`, because NaN must not pass.
        if not error <= allowed:
            raise RotationZooError(
                f"{name} was not converted from {source.name}: its {tensor} differs "
                f"(relative error {error:.2g})",
                hint=CONVERTED_BASE,
            )
        compared.append(tensor)
    return compared


def _relative_error(converted: np.ndarray, original: np.ndarray, is_norm: bool) -> float:
    difference = converted - original
    if is_norm:  # converters store 1 + w for norms that multiply by 1 + w
        difference = difference - np.round(np.median(difference))
    return float(np.linalg.norm(difference) / max(float(np.linalg.norm(original)), 1e-30))


def _converted_rows(tensor: Any) -> np.ndarray | None:
    """The first rows of the GGUF tensor, float32; None for a type that the package cannot read."""
    try:
        rows: np.ndarray = gguf_package().quants.dequantize(tensor.data[:_ROWS], tensor.tensor_type)
    except (NotImplementedError, KeyError, ValueError, IndexError):
        return None
    return rows


def _original_rows(source: Source, ending: str) -> np.ndarray | None:
    """The first rows of the model's only tensor with that ending, float32.

    None if it is not on this machine, unreadable, not unique, or quantized.
    """
    matches = []
    for path in weight_files(source.folder):
        try:
            with safe_open(path, "pt") as file:
                names = list(file.keys())  # a safetensors file is no mapping
                names = [name for name in names if f".{name}".endswith(ending)]
                if ending == ".norm.weight":  # leave out the norms inside layers
                    names = [name for name in names if "layers." not in name]
                matches += [file.get_slice(name)[:_ROWS] for name in names]
        except (OSError, SafetensorError):
            return None
    if len(matches) != 1 or not matches[0].is_floating_point() or matches[0].dtype.itemsize < 2:
        return None
    numbers: np.ndarray = matches[0].to(torch.float32).numpy()
    return numbers
