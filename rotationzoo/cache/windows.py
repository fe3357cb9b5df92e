"""Which tokens a server keeps exact, and which it stores in 2 bits."""

from dataclasses import dataclass
from typing import Literal

import torch

from rotationzoo.codec import int2


@dataclass(frozen=True)
class Cache:
    """How a server stores a cache: which tokens stay exact, and the 2-bit format of the rest."""

    format: int2.Format = int2.SGLANG
    sink: int = 64
    """How many tokens at the start of a request stay exact."""
    recent: int = 256
    """How many tokens at the end of a request stay exact."""
    prefill_chunk: int | None = None
    """Tokens per chunk when the prompt is prefilled in chunks. A query reads its whole chunk exact;
    `prefill_layout` says what it reads exact of earlier chunks. None simulates decoding, where each
    query's `recent` tokens end with the query's own."""
    prefill_layout: Literal["server", "window"] = "server"
    """What stays exact of earlier chunks. With `server` it is only the sink, which is how OSCAR's
    fork of SGLang writes chunks (`_mixed_extend_layout_counts`); there, `recent` applies to
    decoding only. With `window` the `recent` tokens before a chunk stay exact too."""

    def exact(
        self, length: int, device: torch.device | str = "cpu", queries: int | None = None
    ) -> torch.Tensor:
        """Boolean `[Q, T]`: whether query t reads the exact copy of position j, for the last Q =
        `queries` of T = `length` positions, or for all of them (None)."""
        position = torch.arange(length, device=device)
        query = position if queries is None else position[length - queries :]
        chunk = self.prefill_chunk
        end = query + 1 if chunk is None else query // chunk * chunk
        # Positions after the query count as exact here; the model's own mask hides them.
        return (position < self.sink) | (position >= end[:, None] - self._recent)

    @property
    def first_quantized(self) -> int:
        """The position of the first query that reads a quantized position."""
        exact = self.sink + self._recent
        if self.prefill_chunk is None:
            return exact
        # All queries of a chunk read the same earlier positions, so this is the start of the first
        # chunk that has more than `exact` tokens before it.
        chunks = -(-(exact + 1) // self.prefill_chunk)
        return chunks * self.prefill_chunk

    @property
    def _recent(self) -> int:
        """How many tokens stay exact up to and including a query (decoding), or before the start of
        its chunk (prefill)."""
        if self.prefill_chunk is not None and self.prefill_layout == "server":
            return 0
        return self.recent
