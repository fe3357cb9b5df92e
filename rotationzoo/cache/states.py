"""The states of layers without attention, which a 2-bit cache keeps as they are."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from rotationzoo.model.capture import decoder


def layer_states(layer: Any) -> list[tuple[str, torch.Tensor]]:
    """The states of a layer without attention, by name."""
    states = []
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for kind in ("conv_states", "recurrent_states"):
            for number, state in getattr(layer, kind).items():
                if state is not None:
                    states.append((f"state.{kind}.{number}", state))
    return states


def restore_state(layer: Any, kind: str, number: int, state: torch.Tensor) -> None:
    """Give a layer without attention one of its states."""
    getattr(layer, kind)[number] = state
    getattr(layer, f"is_{kind}_initialized")[number] = True
    layer.has_previous_state[number] = True
    layer.device, layer.dtype = state.device, state.dtype
    if kind == "conv_states":
        layer.conv_kernel_size[number] = state.shape[-1]


def layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Layer -> the device of its weights, where they are in memory."""
    devices = {}
    for module in decoder(model).modules():
        weights = [weight for weight in module.parameters() if not weight.is_meta]
        if isinstance(index := getattr(module, "layer_idx", None), int) and weights:
            devices[index] = weights[0].device
    return devices
