"""Is a GGUF file a conversion of the model that an artifact was made for? Shapes, then numbers, as
far as the model is here.

A base of other weights serves rotations of another model: nothing fails, and answers are worse.
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
from rotationzoo.errors import RotationZooError
from rotationzoo.model.files import read_json, weight_files
from rotationzoo.model.geometry import cached_layers
from rotationzoo.model.source import Source, config_hash, find

_ROWS = 256  # of the embedding, from its beginning
# relative error of an embedding: about .1 where it was quantized to 4 bits, 1.4 against other
# weights
_CONVERTED = 0.5
# relative error of norms, which converters keep in float32: 0, and 1e-3 where they went through
# float16
_SAME = 2e-3
_HINT = "give the base that was converted from the model of the artifact"
# Field of the file -> keys of config.json.
_FIELDS = {
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "attention.head_count": ("num_attention_heads",),
    "rope.freq_base": ("rope_theta",),
}


def check_layers(name: str, tensors: dict[str, Any], serving: Payload) -> None:
    """Raise `RotationZooError` unless the file caches keys in the artifact's layers alone, of its
    heads and dimensions."""
    cached = cached_layers(serving.geometry)
    keys = {layer.index: f"blk.{layer.index}.attn_k.weight" for layer in cached}
    if missing := [index for index, tensor in keys.items() if tensor not in tensors]:
        what = "layer" if len(missing) == 1 else "layers"
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise RotationZooError(
            f"{name} is no model of this artifact: it has no keys in {what} {listed}, and the artifact has rotations for them",
            hint=_HINT,
        )
    for layer in cached:
        for tensor in (keys[layer.index], f"blk.{layer.index}.attn_v.weight"):
            if tensor not in tensors:
                continue  # some layers of Gemma 4 have keys for values
            shape = tensors[tensor].shape
            rows = int(shape[1]) if len(shape) == 2 else 0  # ggml's order: inputs first
            fits = (
                rows and not rows % layer.key_dim
                if serving.model is None
                else rows == layer.kv_heads * layer.key_dim
            )
            if not fits:
                raise RotationZooError(
                    f"{name} is no model of this artifact: layer {layer.index} should have {layer.kv_heads} KV heads of "
                    f"{layer.key_dim}, and its {tensor.split('.', 2)[2]} has {rows} rows",
                    hint=_HINT,
                )


def compare(options: Options, reader: Any, package: Any, serving: Payload) -> str:
    """What was found out, as a note. Raises `RotationZooError` for a file that was converted from
    another model."""
    name = options.base.name if options.base else ""
    source = find(options.model) if options.model else _local(serving)
    if source is None:
        model = serving.model or "its model"
        return f"the base was compared by its shapes alone: {model} was not found on this machine (--model says where it is)"
    if options.model and serving.provenance.get(
        "config_sha256", config_hash(source)
    ) != config_hash(source):
        raise RotationZooError(
            f"{options.model} is not the model of this artifact: its config differs",
            hint="check --model",
        )
    config = read_json(source.folder / "config.json")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    _check_config(name, reader, text or {}, source)
    compared = _check_weights(name, reader, package, source)
    if not compared:
        return f"the base was compared by its config alone: the weights of {source.name} are not on this machine"
    return f"the base has the weights of {source.name}, as far as {', '.join(compared)} show"


def _local(serving: Payload) -> Source | None:
    """The model of an artifact where its files are on this machine already; nothing is fetched."""
    model = serving.model
    if model is None:
        return None
    if model == "demo":
        return find(model)
    revision = serving.provenance.get("model_revision")
    try:
        path = huggingface_hub.try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # a name that no hub has
        return None
    return Source(model, Path(path).parent, revision) if isinstance(path, str) else None


def _check_config(name: str, reader: Any, config: dict[str, Any], source: Source) -> None:
    architecture = reader.get_field("general.architecture").contents()
    rope = config.get("rope_parameters")
    config = {**(rope if isinstance(rope, dict) else {}), **config}
    for field, keys in _FIELDS.items():
        stored = reader.get_field(f"{architecture}.{field}")
        value = None if stored is None else stored.contents()
        for key in keys:
            wanted = config.get(key)
            if not isinstance(value, int | float) or not isinstance(wanted, int | float):
                continue
            if not math.isclose(value, wanted, rel_tol=1e-6):
                raise RotationZooError(
                    f"{name} was not converted from {source.name}: its {field} is {value:g}, and {key} is {wanted:g} there",
                    hint=_HINT,
                )


def _check_weights(name: str, reader: Any, package: Any, source: Source) -> list[str]:
    """Which tensors were compared; both norms around the stack and the first rows of the
    embedding."""
    norms = (
        re.fullmatch(r"blk\.(\d{1,4})\.attn_norm\.weight", tensor.name) for tensor in reader.tensors
    )
    last = max((int(match[1]) for match in norms if match), default=0)
    pairs = {
        "output_norm.weight": (".norm.weight", _SAME),
        "blk.0.attn_norm.weight": (".layers.0.input_layernorm.weight", _SAME),
        f"blk.{last}.attn_norm.weight": (f".layers.{last}.input_layernorm.weight", _SAME),
        "token_embd.weight": (".embed_tokens.weight", _CONVERTED),
    }
    stored = {tensor.name: tensor for tensor in reader.tensors}
    compared = []
    for theirs, (ending, allowed) in pairs.items():
        original = _original(source, ending)
        if original is None or theirs not in stored:
            continue
        try:
            numbers = package.quants.dequantize(
                stored[theirs].data[:_ROWS], stored[theirs].tensor_type
            )
        except (NotImplementedError, KeyError, ValueError, IndexError):
            continue  # a type that the package cannot read
        if numbers.shape != original.shape:
            raise RotationZooError(
                f"{name} was not converted from {source.name}: its {theirs} is {list(numbers.shape)}, and "
                f"{list(original.shape)} there",
                hint=_HINT,
            )
        difference = numbers - original
        if allowed == _SAME:
            difference = difference - np.round(
                np.median(difference)
            )  # norms of 1 + w are stored as such
        error = float(np.linalg.norm(difference) / max(float(np.linalg.norm(original)), 1e-30))
        if not error <= allowed:
            raise RotationZooError(
                f"{name} was not converted from {source.name}: its {theirs} differs (relative error {error:.2g})",
                hint=_HINT,
            )
        compared.append(theirs)
    return compared


def _original(source: Source, ending: str) -> np.ndarray | None:
    """The first rows of the model's tensor of that name, float32; None where it is not here, or not
    unique."""
    matches = []
    for path in weight_files(source.folder):
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if f".{name}".endswith(ending)]  # noqa: SIM118 (no mapping)
                if ending == ".norm.weight":  # not those inside the layers
                    names = [name for name in names if "layers." not in name]
                matches += [file.get_slice(name)[:_ROWS] for name in names]
        except (OSError, SafetensorError):
            return None
    if len(matches) != 1 or not matches[0].is_floating_point() or matches[0].dtype.itemsize < 2:
        return None
    numbers: np.ndarray = matches[0].to(torch.float32).numpy()
    return numbers
