"""Padding before the rows of a batch, of which transformers does not tell a cache."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.model.cache_names import given_cache


@dataclass
class Padding:
    """How many columns of padding each row of the batch begins with. All layers share it."""

    starts: list[int] = field(default_factory=list)
    """Empty where no mask was seen: then no row begins with padding."""
    settled: bool = False
    """Whether every row has had a token that is no padding."""

    def of_batch(self, rows: int) -> list[int]:
        """The starts of a batch of so many rows."""
        return self.starts if len(self.starts) == rows else [0] * rows

    def note(self, mask: torch.Tensor) -> None:
        """Read the padding from the mask `[B, T]` of all tokens so far, 0 for padding.

        Once every row has a token, later masks are not looked at: that would take time at every
        decoding step.
        """
        if self.settled:
            return
        hidden = mask.to(torch.bool).cumsum(1) == 0
        self.starts = hidden.sum(1).tolist()
        self.settled = max(self.starts, default=0) < mask.shape[1]

    def forget(self) -> None:
        """Read the padding anew from the next mask."""
        self.starts, self.settled = [], False


def watch_padding(model: PreTrainedModel) -> None:
    """Make a model tell its caches about padding, each time that it runs."""
    if _tell_cache not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_tell_cache, with_kwargs=True)


def _tell_cache(model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    padding = getattr(given_cache(kwargs), "padding", None)
    mask = kwargs.get("attention_mask")
    if isinstance(padding, Padding) and isinstance(mask, torch.Tensor) and mask.ndim == 2:
        padding.note(mask)
