"""The size of a 2-bit cache in bits per element, including its exact windows and its scales."""

from dataclasses import dataclass, replace
from typing import Protocol

from rotationzoo.budget import Budget
from rotationzoo.codec.int2 import Format
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.rotations import Rotations

CONTEXT = 131072  # tokens of the request for which sizes are stated
EXACT_BITS = 16


class Sized(Protocol):
    """A codec that knows the bytes of its rows."""

    @property
    def token_group(self) -> int:
        """How many tokens are quantized together."""

    def stored_bits(self, layer: int, side: str, dim: int, format: Format) -> float:
        """Bits per quantized element, including its share of scales and offsets."""


def bits_per_element(geometry: Geometry, layout: CacheLayout, context: int = CONTEXT) -> float:
    """`codec_bits` of a cache whose layers all store the same bits."""
    codec = RotatedCodec(Rotations({}), layout.group_size)
    return codec_bits(geometry, codec, layout, context)


@dataclass(frozen=True)
class BudgetSizes:
    """A `Sized` codec whose rows take the bits of a budget."""

    budget: Budget
    token_group: int = 1

    def stored_bits(self, layer: int, side: str, dim: int, format: Format) -> float:
        return next(bits for sides, bits in self.budget.shares if side in sides)


def codec_bits(
    geometry: Geometry, codec: Sized, layout: CacheLayout, length: int = CONTEXT
) -> float:
    """Bits per element of a cache of `length` tokens, averaged over all elements. Exact tokens,
    with those of an incomplete group, and rows that stay exact count 16 bits."""
    grouped = replace(layout, token_group=codec.token_group)
    quantized = grouped.quantized_tokens(length) / length
    total, elements = 0.0, 0
    for layer in cached_layers(geometry):
        for side in layer.sides:
            dim = layer.dims[side]
            bits = codec.stored_bits(layer.index, side, dim, layout.format)
            total += layer.kv_heads * dim * bits
        total += EXACT_BITS * layer.exact_elements
        elements += layer.elements
    return quantized * total / elements + (1 - quantized) * EXACT_BITS
