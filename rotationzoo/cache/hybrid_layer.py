"""A cache layer with full attention and linear attention side by side: it stores keys and values in
2 bits, and the states as transformers does."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from rotationzoo.cache.padding import Padding
from rotationzoo.cache.rotated_layer import RotatedLayer
from rotationzoo.cache.settings import Storage
from rotationzoo.cache.states import layer_states


class RotatedHybridLayer(LinearAttentionLayer, RotatedLayer):  # type: ignore[misc, override]
    """Each method serves both parts, as in transformers' own layer of this kind."""

    is_compileable = False

    def __init__(self, storage: Storage, index: int, padding: Padding, states: int):
        RotatedLayer.__init__(self, storage, index, padding)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *rows: Any, **states: Any) -> None:
        """Keys and values are given by position, states by name."""
        if rows:
            RotatedLayer.lazy_initialization(self, *rows)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionLayer.reset(self)
        RotatedLayer.reset(self)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Keep these rows `[B']`, in this order."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        RotatedLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, where the states allow it."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        RotatedLayer.crop(self, tokens_to_remove)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every stored tensor, with its name in a file."""
        return chain(RotatedLayer.tensors(self), layer_states(self))
