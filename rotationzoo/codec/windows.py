"""The layout of a cache: which tokens stay exact, and how the others are stored."""

from dataclasses import dataclass
from typing import Literal

import torch

from rotationzoo.codec import int2
from rotationzoo.recipe import Recipe


@dataclass(frozen=True)
class CacheLayout:
    """How a server stores a cache: which tokens stay exact, and the format of the rest."""

    format: int2.Format = int2.SGLANG
    sink: int = 64
    """Tokens at the start of a request that stay exact."""
    recent: int = 256
    """Tokens at the end of a request that stay exact."""
    prefill_chunk: int | None = None
    """Tokens per chunk of a prompt, which its queries read exact; `prefill_layout` is about earlier
    ones. None simulates decoding, where the `recent` tokens of a query end with its own."""
    prefill_layout: Literal["server", "window"] = "server"
    """Which tokens of earlier chunks stay exact. `server`: only the sink, as OSCAR's fork of SGLang
    writes chunks (`_mixed_extend_layout_counts`), so that `recent` applies to decoding only.
    `window`: the `recent` tokens before a chunk, too."""
    token_group: int = 1
    """How many tokens are quantized together, counted from the end of the sink. They stay exact
    until all of them have left the recent window."""
    group_size: int | None = None
    """Channels that share a scale; None is the whole head."""

    @classmethod
    def of_recipe(cls, recipe: Recipe, format: int2.Format = int2.SGLANG) -> "CacheLayout":
        """The windows and groups that a recipe was made for, in a format."""
        return cls(format, recipe.sink, recipe.recent, group_size=recipe.group_size)

    def exact_for(self, query: torch.Tensor, length: int) -> torch.Tensor:
        """Boolean `[Q, T]`: whether queries at positions `[Q]` read each of T positions exact."""
        position = torch.arange(length, device=query.device)
        groups = (position - self.sink).div(self.token_group, rounding_mode="floor") + 1
        group_end = self.sink + groups * self.token_group
        chunk = self.prefill_chunk
        end = query + 1 if chunk is None else query // chunk * chunk
        # This includes positions after the query, which the model's own mask hides.
        return (position < self.sink) | (group_end > end[:, None] - self._recent)

    def quantized_tokens(self, length: int) -> int:
        """How many tokens of a complete request of `length` tokens are quantized."""
        past = max(0, length - self.sink - self.recent)
        return past // self.token_group * self.token_group

    @property
    def first_quantized(self) -> int:
        """The position of the first query that reads a quantized position."""
        exact = self.sink + self._recent
        if self.prefill_chunk is None:
            return exact
        # The start of the first chunk that has more than `exact` tokens before it.
        chunks = -(-(exact + 1) // self.prefill_chunk)
        return chunks * self.prefill_chunk

    @property
    def reach(self) -> int:
        """The most tokens past the sink that a query may read exact, with its own."""
        # A query at the end of a chunk reads the whole chunk exact, and what stays exact before it.
        return self._recent + (self.prefill_chunk or 0)

    @property
    def _recent(self) -> int:
        """Tokens that stay exact up to a query (decoding), or before its chunk (prefill)."""
        if self.prefill_chunk is not None and self.prefill_layout == "server":
            return 0
        return self.recent
