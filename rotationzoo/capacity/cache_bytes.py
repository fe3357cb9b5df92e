"""Bytes of a request's cache in bf16, fp8, int4 and int2, and the longest context within so many
bytes."""

from dataclasses import dataclass

from rotationzoo.capacity.shape import CachedLayer, Shape
from rotationzoo.codec.formats import FORMATS, Format

CACHES = ("bf16", "fp8", "int4", "int2")
_EXACT_BITS = 16
_PLAIN_BITS = {"bf16": 16, "fp8": 8}
_LONGEST = 1 << 31  # tokens; whatever holds so many holds any context


@dataclass(frozen=True)
class Storage:
    """How a cache of few bits is stored: the format, whose scales and offsets take bits of their
    own, and the first and last tokens of a request that int2 keeps in bf16."""

    format: Format = FORMATS["sglang"]
    sink: int = 64
    recent: int = 256


def request_bytes(shape: Shape, cache: str, context: int, storage: Storage) -> int:
    """Bytes of the cache of one request of `context` tokens. States of linear attention count in
    every cache.

    * `bf16`, `fp8`: 16 and 8 bits an element, nothing else.
    * `int4`: 4 bits an element; each row of a head, or latent, has a scale and an offset. No token
      is exact, and the key beside a latent is.
    * `int2`: the same with 2 bits, and the exact windows of `storage`.
    """
    if cache in _PLAIN_BITS:
        bits = _PLAIN_BITS[cache] * elements(shape, context)
    else:
        bits = sum(_quantized_bits(layer, cache, context, storage) for layer in shape.layers)
    return bits // 8 + shape.state_bytes


def elements(shape: Shape, context: int) -> int:
    """Cached elements of one request of `context` tokens, without the states of linear
    attention."""
    return sum(layer.elements * layer.tokens_held(context) for layer in shape.layers)


def longest_context(shape: Shape, cache: str, free: int, storage: Storage) -> int | None:
    """The most tokens that one request can have in `free` bytes; None if there is no limit, as
    where every layer slides."""
    if free <= request_bytes(shape, cache, 0, storage):
        return 0
    if request_bytes(shape, cache, _LONGEST, storage) <= free:
        return None
    fits, too_many = 0, _LONGEST
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if request_bytes(shape, cache, middle, storage) <= free:
            fits = middle
        else:
            too_many = middle
    return fits


def _quantized_bits(layer: CachedLayer, cache: str, context: int, storage: Storage) -> int:
    held = layer.tokens_held(context)
    metadata = layer.rows * 2 * storage.format.metadata_bits
    metadata += (layer.elements - layer.rounded) * _EXACT_BITS
    if cache == "int4":
        return held * (4 * layer.rounded + metadata)
    # A layer that slides forgets the sink.
    forgotten = context - held
    exact = min(held, max(0, storage.sink - forgotten) + storage.recent)
    return exact * layer.elements * _EXACT_BITS + (held - exact) * (2 * layer.rounded + metadata)
