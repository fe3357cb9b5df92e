"""What a 2-bit cache costs: bits per element, with its exact windows and its scales."""

from rotationzoo.codec import int2
from rotationzoo.model.geometry import Geometry, cached_layers

CONTEXT = 131072  # tokens at which bits per element are stated


def bits_per_element(
    geometry: Geometry, group_size: int | None, form: int2.Format, sink: int, recent: int
) -> float:
    """Bits that an element of a 2-bit cache costs at `CONTEXT` tokens, mean over all that the model
    caches."""
    sizes = [
        (dim, layer.kv_heads * dim)
        for layer in cached_layers(geometry)
        for dim in (layer.key_dim, layer.value_dim)
    ]
    bits = (
        count
        * int2.bits_per_element(dim, group_size, form, context=CONTEXT, sink=sink, recent=recent)
        for dim, count in sizes
    )
    return sum(bits) / sum(count for _, count in sizes)
