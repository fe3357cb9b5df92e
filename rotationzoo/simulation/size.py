"""The size of a 2-bit cache in bits per element, including its exact windows and its scales."""

from dataclasses import replace

from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.rotations import Rotations
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.layout import CacheLayout

CONTEXT = 131072  # tokens of the request for which sizes are stated
EXACT_BITS = 16


def bits_per_element(geometry: Geometry, layout: CacheLayout, context: int = CONTEXT) -> float:
    """Bits per element of a cache whose layers all store the same bits, as `arm_bits` has them."""
    return arm_bits(geometry, Arm("", Rotations({}), layout.group_size), layout, context)


def arm_bits(geometry: Geometry, arm: Arm, layout: CacheLayout, length: int = CONTEXT) -> float:
    """Bits per element of an arm's cache that holds `length` tokens, averaged over every element
    that the model caches.

    Exact tokens count 16 bits, including tokens of a group that is not complete yet, and so do keys
    with RoPE beside a latent. Arms with as many of these bits take equal bytes.
    """
    grouped = replace(layout, token_group=arm.token_group)
    quantized = grouped.quantized_tokens(length) / length
    total, elements = 0.0, 0
    for layer in cached_layers(geometry):
        for side in layer.sides:
            dim = layer.dims[side]
            format = arm.stored_format(layer.index, side, layout.format)
            total += layer.kv_heads * dim * arm.stored_bits(side, dim, format)
        total += EXACT_BITS * (layer.rope_dim or 0)
        elements += layer.elements
    return quantized * total / elements + (1 - quantized) * EXACT_BITS
