"""Which tokens a server keeps exact, and which it stores in 2 bits."""

from dataclasses import dataclass
from typing import Literal

import torch

from rotationzoo.codec import int2


@dataclass(frozen=True)
class Cache:
    """What a server keeps exact and how it stores the rest."""

    format: int2.Format = int2.SGLANG
    sink: int = 64
    """The first tokens of a request are kept exact."""
    recent: int = 256
    """The last tokens of a request are kept exact."""
    prefill_chunk: int | None = None
    """Tokens of a chunk, where the prompt is read in chunks: a query reads its whole chunk exact,
    and of earlier chunks what `prefill_layout` says. None is decoding: the `recent` tokens of a
    query end with its own."""
    prefill_layout: Literal["server", "window"] = "server"
    """What earlier chunks leave exact. `server`: the sink alone, as OSCAR's fork of SGLang writes
    chunks (`_mixed_extend_layout_counts`); its `recent` tokens are for decoding. `window`: also the
    `recent` tokens before a chunk."""

    def exact(self, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Boolean `[T, T]`: whether query t reads position j from the exact copy."""
        position = torch.arange(length, device=device)
        chunk = self.prefill_chunk
        end = position + 1 if chunk is None else position // chunk * chunk
        return (position < self.sink) | (position >= end[:, None] - self._recent)

    @property
    def first_quantized(self) -> int:
        """The first query that reads a quantized position."""
        exact = self.sink + self._recent
        if self.prefill_chunk is None:
            return exact
        # All queries of a chunk read the same earlier positions: the first chunk that starts later.
        chunks = -(-(exact + 1) // self.prefill_chunk)
        return chunks * self.prefill_chunk

    @property
    def _recent(self) -> int:
        """Tokens kept exact before those that are written together: a query, or its chunk."""
        if self.prefill_chunk is not None and self.prefill_layout == "server":
            return 0
        return self.recent
