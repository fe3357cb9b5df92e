"""Quantized checkpoints: whether this machine can load them, and which ones load dequantized."""

import importlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rotationzoo.errors import UnsupportedModel, first_sentence
from rotationzoo.model.files import Stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# For these, transformers would fetch kernels from a hub, or unpack weights in the first forward
# pass, after accelerate has moved them. Values: what the scales' names have in place of `.weight`.
_FP8_SCALES = ".weight_scale_inv", "_scale_inv", ".scale", ".qscale_weight"
_DEQUANTIZED = {
    "fp8": _FP8_SCALES,
    "mxfp8": _FP8_SCALES,
    "mxfp4": ("_scales",),
    "compressed-tensors": (".weight_scale",),
}
_PLAIN = {"F64", "F32", "F16", "BF16", "BOOL", "I64", "I32"}  # I32: packed codes of other modules
# Endings of the companions of codes, and of masks that old models store.
_NO_WEIGHT = re.compile(r"(scales?|scale_inv|scale_weight|zero_point|g_idx|bias|mask)$")
_UNQUANTIZED = "give the model that it was quantized from"
_PACKAGE = re.compile(r"pip install (?:-U )?([^`'\"]*[\w.\]])")


def quantization_of(config: "PretrainedConfig") -> dict[str, Any] | None:
    """The `quantization_config` of a checkpoint or of its text part; None if not quantized."""
    for part in (config, config.get_text_config(decoder=True)):
        if table := getattr(part, "quantization_config", None):
            return dict(table if isinstance(table, dict) else table.to_dict())
    return None


def is_dequantized(config: "PretrainedConfig") -> bool:
    """Whether quantized weights are dequantized to the config's dtype when they are loaded."""
    return (quantization_of(config) or {}).get("quant_method") in _DEQUANTIZED


def dequantize(config: "PretrainedConfig") -> None:
    """Change the config to dequantize while loading, if the method needs it."""
    if is_dequantized(config):
        config.quantization_config = {**(quantization_of(config) or {}), "dequantize": True}


def check_codes(tensors: Mapping[str, Stored], config: "PretrainedConfig", name: str) -> None:
    """Raise `UnsupportedModel` if transformers would load codes without their scale, or FP8 in
    blocks that are cut short, which it scales wrong (5.17 and 5.23). `tensors` are the files'
    headers."""
    table = quantization_of(config) or {}
    method, blocks = str(table.get("quant_method", "")), table.get("weight_block_size")
    for key, stored in tensors.items():
        stem = key.removesuffix("_blocks").removesuffix("_packed").removesuffix(".weight")
        scales = [f"{stem}{ending}" for ending in _DEQUANTIZED.get(method, ())]
        plain = stored.dtype in _PLAIN or _NO_WEIGHT.search(key) or tensors.keys() & scales
        # Other quantizations have parameters for scales, so transformers notices missing ones.
        if plain or (method and method not in _DEQUANTIZED):
            continue
        needed = f"{method} needs {scales[0]}" if scales else "its config names no quantization"
        codes = f"codes ({stored.dtype}) without a scale that transformers would apply: {needed}"
        problem = f"{name} cannot be loaded, because {key} holds {codes}"
        raise UnsupportedModel(problem, _UNQUANTIZED)
    if not is_dequantized(config) or not blocks:
        return
    for weight, stored in tensors.items():
        shape, scales_of = stored.shape, tensors.get(f"{weight}_scale_inv")
        if scales_of is None or len(shape) != 2 or len(scales_of.shape) != 2:
            continue
        sizes = zip(shape, scales_of.shape, blocks, strict=True)
        if any(count > 1 and size // count != block for size, count, block in sizes):
            cut_short = f"in blocks of {list(blocks)} that are cut short, with wrong scales"
            problem = f"{name} cannot be loaded, because {weight} of {shape} is stored {cut_short}"
            raise UnsupportedModel(problem, _UNQUANTIZED)


def check_loadable(config: "PretrainedConfig", name: str, device: str) -> None:
    """Raise `UnsupportedModel` unless transformers can load these weights onto `device` here."""
    table = quantization_of(config)
    if table is None:
        return
    # Imported by name, because mypy does not know the module's types.
    quantizers: Any = importlib.import_module("transformers.quantizers.auto")
    method = table.get("quant_method", "an unnamed method")
    reason, hint = None, _UNQUANTIZED
    try:
        if not quantizers.AutoHfQuantizer.supports_quant_method(table):
            reason = f"transformers does not know the quantization {method}"
        else:
            if is_dequantized(config):
                table["dequantize"] = True
            quantizer = quantizers.AutoHfQuantizer.from_config(table, pre_quantized=True)
            quantizer.validate_environment(device_map={"": device})
    except Exception as error:  # each method raises other errors
        reason = first_sentence(error)
        package = _PACKAGE.search(str(error))
        missing = package[1] if package else getattr(error, "name", None)
        if isinstance(error, ImportError) and missing:
            hint = f"run: pip install '{missing}'"
    if reason is not None:
        problem = f"{name} cannot be loaded, because it is quantized with {method}: {reason}"
        raise UnsupportedModel(problem, hint)
