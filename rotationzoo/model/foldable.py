"""Whether a model's weights can carry an equalizer, found by running it on `meta`.

Nothing here knows a model by name: what makes the queries, keys and values of each layer is traced.
"""

from unittest.mock import patch

import torch
from transformers import Cache, PreTrainedModel

from rotationzoo.errors import UnsupportedModel, as_unavailable
from rotationzoo.model.capture import Attention, decoder, intercept
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.model.key_scales import KeyScales
from rotationzoo.model.scale_labels import label_weights
from rotationzoo.model.scale_trace import ScaleTrace
from rotationzoo.model.value_projections import find_projections

_TOKENS = 4  # in the traced run: more than 1, so that a factor that differs by token would show


def check_equalizable(model: PreTrainedModel, geometry: Geometry) -> str | None:
    """Why the weights of a model on `meta` cannot carry an equalizer, or None if they can.

    They can if the keys of every cached layer may have a factor for each RoPE pair of channels, and
    its values may be multiplied by an invertible matrix.
    """
    name = "the model"
    try:
        find_key_scales(model, geometry, name)
        find_projections(model, geometry, name)
    except UnsupportedModel as refusal:
        return str(refusal)
    return None


@torch.no_grad()
def find_key_scales(model: PreTrainedModel, geometry: Geometry, name: str) -> KeyScales:
    """The weights that scale the queries and keys of a model on `meta`.

    Raises `UnsupportedModel` for a layer whose keys no weight can scale exactly.
    """
    weights = label_weights(model)
    trace = ScaleTrace(weights)
    calls: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attention(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        calls[layer] = trace.labels(query)[0], trace.labels(key)[0]
        trace.pin([value], "values that use the same weight")
        trace.paused = True
        output = attend(query, key, value).contiguous()
        trace.paused = False
        return output

    tower = decoder(model)
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=path: setattr(trace, "inside", path))
        for path, module in model.named_modules()
    ]
    # A cache returns copies of what it stores; here it returns the tensors themselves.
    uncopied = patch.object(Cache, "update", lambda self, key, value, *args, **kwargs: (key, value))
    labelled = patch.object(torch.nn.Linear, "forward", lambda *args: trace.project(*args))
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    try:
        with (
            as_unavailable(f"{name} fails when it runs"),
            uncopied,
            labelled,
            intercept(model, attention),
            trace,
        ):
            tower(input_ids=tokens, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    scales = KeyScales(weights, trace.constraints, calls, geometry)
    for layer in cached_layers(geometry):
        if problem := scales.problem(layer.index):
            raise UnsupportedModel(
                f"layer {layer.index} of {name} has keys that cannot be scaled exactly: {problem}"
            )
    return scales
