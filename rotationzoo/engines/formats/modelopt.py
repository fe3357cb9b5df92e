"""NVIDIA's ModelOpt, which gets the bits of each layer and no rotations: in
`kv_cache_quantized_layers` (schema 1) of a checkpoint's `hf_quant_config.json`."""

import shlex
from pathlib import Path

from rotationzoo import __version__
from rotationzoo.artifact.reductions import Settled
from rotationzoo.engines.base import Launch, Payload
from rotationzoo.storage import strict_json
from rotationzoo.storage.folders import write_new

FILE = "hf_quant_config.json"


def write_files(work: Path, final: Path, payload: Payload, request: Settled) -> Launch:
    """Write the file: NVFP4 for layers of up to 4 bits on both sides, FP8 for others."""
    layers = {}
    for layer, bits in sorted(payload.bits.items()):
        layers[f"model.layers.{layer}.self_attn"] = {"quant_algo": "NVFP4" if bits <= 4 else "FP8"}
    used = {each["quant_algo"] for each in layers.values()}
    quantization = {
        "quant_algo": None,
        "quantized_layers": {},
        "kv_cache_quant_algo": used.pop() if len(used) == 1 else "MIXED_PRECISION",
        "kv_cache_quantized_layers": layers,
        "kv_cache_schema_version": 1,
    }
    # Readers know the schema by this name.
    producer = {"name": "modelopt", "version": f"rotationzoo {__version__}"}
    write_new(work / FILE, strict_json.text({"producer": producer, "quantization": quantization}))
    notes = [
        f"put {FILE} next to config.json: vLLM's pull request 56116 reads it, and no release does",
        "vLLM reads the file only beside a config.json without a quantization_config",
        "layers are named as in models of one decoder; scales are not in the file",
        "layers of fewer than 4 bits get NVFP4, the smallest format there is",
    ]
    return Launch([f"vllm serve {shlex.quote(payload.model)} --kv-cache-dtype auto"], {}, notes)
