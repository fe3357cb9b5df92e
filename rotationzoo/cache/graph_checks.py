"""Which models and caches a `DecodingGraph` can be made for."""

import inspect

from transformers import PreTrainedModel

from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.cache.rotated_layer import RotatedLayer
from rotationzoo.errors import UnsupportedModel, UsageError

HINT = "use the cache without a DecodingGraph"


def check_graph(model: PreTrainedModel, cache: RotatedCache, room: int) -> list[RotatedLayer]:
    """The layers of a cache whose steps can be replayed. Raises as `DecodingGraph` does."""
    if not isinstance(cache, RotatedCache) or not cache.is_of(model):
        raise UsageError(
            "the cache is no RotatedCache of this model", hint="make one: RotatedCache(..., model)"
        )
    name = type(model).__name__
    layers = [layer for layer in cache.layers if type(layer) is RotatedLayer]
    if not isinstance(room, int) or room < 1:
        raise UsageError(f"room must be a whole number of at least 1, not {room!r}", hint="room=64")
    if any(layer.lent for layer in layers):
        raise UsageError("another DecodingGraph has this cache", hint="close it first")
    if cache.has_models_class or len(layers) < len(cache.layers):
        others = {type(layer).__name__ for layer in cache.layers if type(layer) is not RotatedLayer}
        what = f"layers of type {', '.join(sorted(others))}" if others else "a cache of its own"
        raise UnsupportedModel(
            f"{name} has {what}, and a DecodingGraph needs full attention in all layers", hint=HINT
        )
    if not all(layer.is_initialized for layer in layers):
        raise UsageError(
            "the cache is empty", hint="read the prompt first: model(ids, past_key_values=cache)"
        )
    if any(layer.starts != [0] for layer in layers):
        raise UsageError(
            "the rows of the cache begin with padding, and a DecodingGraph needs rows without it",
            hint="give prompts of the same length",
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{name} takes no position ids", hint=HINT)
    devices = {str(weights.device) for weights in model.parameters()}
    if devices != {str(layers[0].device)}:
        raise UnsupportedModel(
            f"the weights of {name} are on {', '.join(sorted(devices))}, and a DecodingGraph needs "
            "all of them on the device of the cache",
            hint=HINT,
        )
    return layers
