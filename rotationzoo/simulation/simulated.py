"""A model that reads its keys and values from a quantized cache, simulated in one forward pass.

A server keeps the first `sink` and the last `recent` tokens of a request exact. So queries soon
after a position read it exact, and later ones read it quantized. To simulate this in one pass, the
model's own attention function gets keys and values `[exact; quantized]` of twice the length, and a
mask that shows each query one copy of each position (`mask_blocks`). The model's own sliding
windows, soft cap and attention sinks still apply.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from transformers import PreTrainedModel

from rotationzoo.codec.int2 import Format
from rotationzoo.codec.size import Sized
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import UnsupportedModel
from rotationzoo.geometry import Geometry
from rotationzoo.model.capture import Attention, Call, intercept
from rotationzoo.model.latent import cached_of
from rotationzoo.model.long_masks import LongMask, query_blocks, seen_keys


def mask_blocks(
    attend: Attention, cache: CacheLayout, query: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """For blocks of the queries `[B, H, T, D]` of one attention call: the queries, the `[exact;
    quantized]` positions that they see, and their mask. The model's own mask may be None, which is
    causal. Raises `UnsupportedModel` for a mask of another shape."""
    length, device = query.shape[2], query.device
    positions = torch.arange(length, device=device)
    for queries in query_blocks(length):
        single = _own_rows(attend, queries, positions)
        # The mask of all queries would take 34 GB for 131,072 tokens.
        mask = _both_copies(single, cache.exact_for(positions[queries], length))
        seen = seen_keys(mask)
        yield queries, seen, mask[..., seen]


def _own_rows(attend: Attention, queries: slice, positions: torch.Tensor) -> torch.Tensor:
    """The model's own mask `[B or 1, 1, q, T]` of some queries."""
    mask, length = attend.mask, len(positions)
    if mask is None:
        return (positions <= positions[queries][:, None])[None, None]
    if len(mask.shape) != 4 or tuple(mask.shape[-2:]) != (length, length):
        raise UnsupportedModel(
            f"{type(attend.module).__name__} masks its attention in a way that cannot "
            "show it a second copy of its cache"
        )
    return mask.rows(queries) if isinstance(mask, LongMask) else mask[:, :, queries]


def _both_copies(mask: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The mask over `[exact; quantized]`, from the model's own and `exact` `[Q, T]`."""
    if mask.dtype == torch.bool:
        return torch.cat([mask & exact, mask & ~exact], dim=-1)
    hidden = torch.finfo(mask.dtype).min
    return torch.cat([mask.masked_fill(~exact, hidden), mask.masked_fill(exact, hidden)], dim=-1)


TOKENS = 16384
"""Tokens that are quantized at a time. The codec takes about ten times the memory of its rows, most
of it to sort magnitudes: 5 GB for 131,072 tokens of 8 heads of 128."""


class SimulatedCodec(Sized, Protocol):
    """The codec of a simulation: `RotatedCodec`, or a rival's."""

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` of a layer as the exact windows store them."""

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: Format
    ) -> torch.Tensor:
        """Rows `[B, H, T, D]` after the sink as they are read; incomplete groups stay exact."""


@dataclass(frozen=True)
class Simulation:
    """A model that reads its keys and values as a codec stores them."""

    codec: SimulatedCodec
    cache: CacheLayout
    geometry: Geometry
    layers: set[int]
    """Layers that read their cache quantized; the others read it exact."""

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[None]:
        """Make the model read its cache through the codec in a `with` block."""
        with intercept(model, self.attend):
            yield

    def attend(self, call: Call) -> torch.Tensor:
        """The attention output `[B, T, H_q, D_v]` of a call, as an `Intercept`."""
        if call.layer not in self.layers:
            return call.run()
        query, outputs = call.query, []
        assert query.shape[2] == call.key.shape[2], "a simulation reads whole rows"
        keys, values = self._read_cache(call)
        cache = replace(self.cache, token_group=self.codec.token_group)
        # Each block of queries reads only the positions that it sees.
        for queries, seen, mask in mask_blocks(call.attend, cache, query):
            read = replace(call.attend, mask=mask)
            outputs.append(read(query[:, :, queries], keys[:, :, seen], values[:, :, seen]))
        return torch.cat(outputs, dim=1)

    def _read_cache(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[exact; quantized]`, as the layer that owns the cache stores them."""
        owner = next(layer.owner for layer in self.geometry if layer.index == call.layer)
        cached, exact, quantized = cached_of(call), {}, {}
        for side, rows in cached.sides.items():
            exact[side], quantized[side] = self._both_copies(rows, owner, side)
        both = zip(cached.read(exact), cached.read(quantized), strict=True)
        keys, values = (torch.cat(copies, dim=2) for copies in both)
        return keys, values

    def _both_copies(
        self, rows: torch.Tensor, owner: int, side: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a side, exact and quantized."""
        codec, cache = self.codec, self.cache
        exact = codec.keep_exact(rows, owner, side)
        # No query reads a quantized sink token. Groups of tokens begin after the sink.
        quantized, step = [], TOKENS // codec.token_group * codec.token_group
        for first in range(cache.sink, rows.shape[2], step):
            part = rows[:, :, first : first + step]
            quantized.append(codec.fake_quantize(part, owner, side, cache.format))
        return exact, torch.cat([exact[:, :, : cache.sink], *quantized], dim=2)
