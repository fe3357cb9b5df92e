"""The size of a 2-bit cache in bits per element, including its exact windows and its scales."""

from rotationzoo.codec import int2
from rotationzoo.model.geometry import Geometry, cached_layers

CONTEXT = 131072  # tokens of the request for which sizes are stated


def bits_per_element(
    geometry: Geometry, group_size: int | None, format: int2.Format, sink: int, recent: int
) -> float:
    """Bits per element of a 2-bit cache at `CONTEXT` tokens, averaged over every element that the
    model caches."""
    bits, elements = 0.0, 0
    for layer in cached_layers(geometry):
        for dim in (layer.key_dim, layer.value_dim):
            each = int2.bits_per_element(
                dim, group_size, format, context=CONTEXT, sink=sink, recent=recent
            )
            count = layer.kv_heads * dim  # elements per token
            bits += count * each
            elements += count
    return bits / elements
