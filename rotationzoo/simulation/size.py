"""The size of a 2-bit cache in bits per element, including its exact windows and its scales."""

from collections.abc import Callable
from dataclasses import replace

from rotationzoo.codec import int2
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.layout import CacheLayout

CONTEXT = 131072  # tokens of the request for which sizes are stated
EXACT_BITS = 16


def bits_per_element(geometry: Geometry, layout: CacheLayout, context: int = CONTEXT) -> float:
    """Bits per element of a cache that holds `context` tokens, averaged over every element that the
    model caches."""
    windows = {"context": context, "sink": layout.sink, "recent": layout.recent}

    def bits(_: int, side: str, dim: int) -> float:
        return int2.bits_per_element(dim, layout.group_size, layout.format, **windows)

    return _average(geometry, bits)


def arm_bits(geometry: Geometry, arm: Arm, layout: CacheLayout, length: int = CONTEXT) -> float:
    """Bits per element of an arm's cache that holds `length` tokens, averaged over every element
    that the model caches.

    Exact tokens count 16 bits, including tokens of a group that is not complete yet.
    Arms with as many of these bits take equal bytes.
    """
    grouped = replace(layout, token_group=arm.token_group)
    quantized = grouped.quantized_tokens(length) / length

    def bits(layer: int, side: str, dim: int) -> float:
        return arm.stored_bits(side, dim, arm.stored_format(layer, side, layout.format))

    stored = _average(geometry, bits)
    return quantized * stored + (1 - quantized) * EXACT_BITS


def _average(geometry: Geometry, bits: Callable[[int, str, int], float]) -> float:
    """The mean of `bits(layer, side, dim)` over every element that the model caches. Keys with RoPE
    beside a latent stay exact."""
    total, elements = 0.0, 0
    for layer in cached_layers(geometry):
        for side in layer.sides:
            dim = layer.dims[side]
            total += layer.kv_heads * dim * bits(layer.index, side, dim)
        total += EXACT_BITS * (layer.rope_dim or 0)
        elements += layer.elements
    return total / elements
