"""transformers' own KV cache for a simulation that decodes token by token."""

from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def cache_of_all_positions(model: PreTrainedModel) -> DynamicCache | None:
    """An empty cache that keeps the keys and values of every position, as the model computes them;
    None for a model that needs a cache class of its own.

    This is for arms and layers that only a simulation knows; a cache that holds codes is
    `rotated.RotatedCache`. While a `Simulation` runs, each decoding step reads keys and values
    through the 2-bit codec. A layer with a sliding window would drop old positions, and with
    them the number of each position. Here it keeps them all, and its mask hides them as before.
    """
    untyped: Any = model
    if not untyped._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicSlidingWindowLayer):
            cache.layers[number] = DynamicLayer()
    return cache
