"""Quantized checkpoints: whether this machine can load them, and which ones load dequantized."""

import importlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rotationzoo.errors import UnsupportedModel, first_sentence
from rotationzoo.model.files import Stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# transformers would multiply these by kernels that it fetches from a hub, or unpack them in the
# first forward pass, after accelerate has moved them. Each has the endings of scales' names that
# transformers applies, in place of `.weight`.
_FP8_SCALES = ".weight_scale_inv", "_scale_inv", ".scale", ".qscale_weight"
_DEQUANTIZED = {
    "fp8": _FP8_SCALES,
    "mxfp8": _FP8_SCALES,
    "mxfp4": ("_scales",),
    "compressed-tensors": (".weight_scale",),
}
_PLAIN = {"F64", "F32", "F16", "BF16", "BOOL", "I64", "I32"}  # I32: packed codes have own modules
# Endings of what goes with codes, and of masks that old models store with their weights.
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
    """Whether quantized weights are plain ones, of the config's dtype, once they are loaded."""
    return (quantization_of(config) or {}).get("quant_method") in _DEQUANTIZED


def dequantize(config: "PretrainedConfig") -> None:
    """Dequantize while loading, if these weights would otherwise need kernels from a hub."""
    if is_dequantized(config):
        config.quantization_config = {**(quantization_of(config) or {}), "dequantize": True}


def check_codes(tensors: Mapping[str, Stored], config: "PretrainedConfig", name: str) -> None:
    """Raise `UnsupportedModel` if transformers would load codes as weights, without their scale.

    `tensors` are its headers. Weights in FP8 with blocks that are cut short are refused, too:
    transformers takes their size from the number of scales (`Fp8Dequantize` in 5.17 and 5.23).
    """
    table = quantization_of(config) or {}
    method, blocks = str(table.get("quant_method", "")), table.get("weight_block_size")
    for key, stored in tensors.items():
        stem = key.removesuffix("_blocks").removesuffix("_packed").removesuffix(".weight")
        scales = [f"{stem}{ending}" for ending in _DEQUANTIZED.get(method, ())]
        plain = stored.dtype in _PLAIN or _NO_WEIGHT.search(key) or tensors.keys() & scales
        # Modules of other quantizations have parameters for scales: it says which are missing.
        if plain or (method and method not in _DEQUANTIZED):
            continue
        needed = f"{method} needs {scales[0]}" if scales else "its config names no quantization"
        codes = f"codes ({stored.dtype}) without a scale that transformers would apply: {needed}"
        problem = f"{name} cannot be loaded, because {key} holds {codes}"
        raise UnsupportedModel(problem, _UNQUANTIZED)
    if not is_dequantized(config) or not blocks:
        return
    shapes = {key: stored.shape for key, stored in tensors.items()}
    for key, grid in shapes.items():
        weight = key.removesuffix("_scale_inv")
        shape = shapes.get(weight, [])
        if weight == key or len(shape) != 2 or len(grid) != 2:
            continue
        cut = [
            count > 1 and size // count != block
            for size, count, block in zip(shape, grid, blocks, strict=True)
        ]
        if any(cut):
            cut_short = f"in blocks of {list(blocks)} that are cut short, with wrong scales"
            problem = f"{name} cannot be loaded, because {weight} of {shape} is stored {cut_short}"
            raise UnsupportedModel(problem, _UNQUANTIZED)


def check_loadable(config: "PretrainedConfig", name: str, device: str) -> None:
    """Raise `UnsupportedModel` unless transformers can load these weights onto `device` here."""
    table = quantization_of(config)
    if table is None:
        return
    # Not `from transformers.quantizers`, which mypy cannot see through.
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
    except Exception as error:  # each method has checks of its own
        reason = first_sentence(error)
        package = _PACKAGE.search(str(error))
        missing = package[1] if package else getattr(error, "name", None)
        if isinstance(error, ImportError) and missing:
            hint = f"run: pip install '{missing}'"
    if reason is not None:
        problem = f"{name} cannot be loaded, because it is quantized with {method}: {reason}"
        raise UnsupportedModel(problem, hint)
