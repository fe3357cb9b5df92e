"""Bytes of a model's weights as they are published, and in 4 bits."""

from dataclasses import dataclass
from typing import Any

import huggingface_hub

from rotationzoo.capacity.shape import Shape
from rotationzoo.model.files import indexed_bytes, text_config, weight_files
from rotationzoo.model.source import Source
from rotationzoo.network.huggingface_session import asking_huggingface
from rotationzoo.network.tokens import huggingface_token

FOUR_BITS = 4 + (16 + 4) / 128
"""Bits of a weight in AWQ and GPTQ: for each group of 128, a float16 scale and a 4-bit zero."""
_MXFP4_BITS = 4 + 8 / 32  # an 8-bit exponent for each block of 32
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_STORED_BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """Sizes of a model's weights in bytes."""

    published: int
    four_bit: int
    origin: str
    """The source of the published size: `files`, `index`, `hub` or `config`."""


def weigh(source: Source, config: dict[str, Any], shape: Shape) -> Weights:
    """The sizes of a model's weights, from its files, its index, the hub or its config, whichever
    is at hand first. In 4 bits, embedding and output projection stay in 16 bits, as AWQ and GPTQ
    have it."""
    bits, only_experts = _published_bits(config)
    published, origin = _published_bytes(source)
    embeddings = shape.embedding * (1 if shape.tied else 2)
    if published is None:
        kept = shape.parameters - shape.expert_parameters if only_experts else embeddings
        published, origin = _packed(shape, bits, kept), "config"
    four_bit = _packed(shape, FOUR_BITS, embeddings)
    if bits < 5 or published < four_bit:
        four_bit = published  # which has 4 bits already
    return Weights(published, four_bit, origin)


def _packed(shape: Shape, bits: float, kept: int) -> int:
    """Bytes where the parameters take `bits`, but for those `kept` in 16. Weights of 16 and 32 bits
    are all alike."""
    if bits >= 16:
        return int(shape.parameters * bits / 8)
    kept = min(kept, shape.parameters)
    return int(kept * 2 + (shape.parameters - kept) * bits / 8)


def _published_bits(config: dict[str, Any]) -> tuple[float, bool]:
    """Bits of a published weight, and whether only routed experts have so few."""
    tables = config, text_config(config)
    for table in tables:
        quantized = table.get("quantization_config")
        if isinstance(quantized, dict):
            if quantized.get("quant_method") == "mxfp4":
                return _MXFP4_BITS, True
            bits = quantized.get("bits", 4 if quantized.get("load_in_4bit") else 8)
            return (FOUR_BITS if bits == 4 else 8.0), False
    names = [table.get(key) for table in tables for key in ("dtype", "torch_dtype")]
    known = [_ITEM_BYTES[name] for name in names if isinstance(name, str) and name in _ITEM_BYTES]
    return (8.0 * known[0] if known else 16.0), False


def _published_bytes(source: Source) -> tuple[int | None, str]:
    """The size and what told it; None where only the config is left."""
    if paths := weight_files(source.folder):
        return sum(path.stat().st_size for path in paths), "files"
    if (size := indexed_bytes(source.folder)) is not None:
        return size, "index"
    return _ask_hub(source), "hub"


def _ask_hub(source: Source) -> int | None:
    """The size that the hub's safetensors metadata give, in one small request. None for a folder,
    without a network, or if the hub does not know."""
    if source.revision is None:
        return None
    try:
        huggingface_token()  # raises before any request for a token that cannot be sent
        with asking_huggingface(repeats=True):
            info = huggingface_hub.HfApi().model_info(
                source.name, revision=source.revision, expand=["safetensors"]
            )
        counts = info.safetensors.parameters if info.safetensors else {}
        return sum(_STORED_BYTES[name] * count for name, count in counts.items()) or None
    except Exception:  # without a size from the hub, the config is left
        return None
