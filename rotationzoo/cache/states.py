"""The states of layers without attention, which a 2-bit cache keeps as they are."""

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin


def layer_states(layer: Any) -> list[tuple[str, torch.Tensor]]:
    """The states of a layer without attention, by name."""
    states = []
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for kind in ("conv_states", "recurrent_states"):
            for number, state in getattr(layer, kind).items():
                if state is not None:
                    states.append((f"state.{kind}.{number}", state))
    return states
