"""NVIDIA's ModelOpt, whose word for bits by layer is `kv_cache_quantized_layers` (schema 1) in a
checkpoint's `hf_quant_config.json`. It has no rotations: only the bits of layers go there.
"""

import shlex
from pathlib import Path

from rotationzoo import __version__
from rotationzoo.engines.base import Launch, Options, Payload
from rotationzoo.storage import strict_json
from rotationzoo.storage.folders import write_new

FILE = "hf_quant_config.json"
_FORMATS = {4: "NVFP4", 8: "FP8"}
"""Bits -> the format of keys and values of a layer, which are alike."""


def write_files(work: Path, final: Path, payload: Payload, options: Options) -> Launch:
    """Write the file: each layer gets the smallest format with as many bits as its side of more."""
    layers, left = {}, []
    for layer, bits in sorted(payload.bits.items()):
        if fitting := [name for most, name in _FORMATS.items() if bits <= most]:
            layers[f"model.layers.{layer}.self_attn"] = {"quant_algo": fitting[0]}
        else:
            left.append(str(layer))
    used = {each["quant_algo"] for each in layers.values()}
    quantization = {
        "quant_algo": None,
        "kv_cache_quant_algo": used.pop() if len(used) == 1 else "MIXED_PRECISION",
        "kv_cache_quantized_layers": layers,
        "kv_cache_schema_version": 1,
    }
    # Readers know the schema by this name.
    producer = {"name": "modelopt", "version": f"rotationzoo {__version__}"}
    content = {"producer": producer, "quantization": quantization}
    write_new(work / FILE, strict_json.text(content))
    notes = [
        f"put {FILE} beside the model's config.json: vLLM's pull request 56116 reads it, and no "
        "release does",
        "layers have names as in models of one decoder, and scales are not in the file",
    ]
    if any(bits < min(_FORMATS) for bits in payload.bits.values()):
        notes.append("layers of fewer than 4 bits get NVFP4, the smallest format there is")
    if left:
        notes.append(f"layers of more than 8 bits are left out: {', '.join(left)}")
    command = f"vllm serve {shlex.quote(payload.model)} --kv-cache-dtype auto"
    return Launch([command], {}, notes)
