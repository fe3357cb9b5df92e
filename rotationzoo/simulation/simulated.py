"""A model that reads its keys and values from a quantized cache, simulated in one forward pass.

A server keeps the first `sink` and the last `recent` tokens of a request exact. Queries soon after
a position therefore read it exact, and later queries read it quantized. To simulate this in one
pass over whole rows, the model's own attention function is called on keys and values
`[exact; quantized]` of twice the length. A mask shows each query one of the two copies of each
position (`TwoCopyMask`). The model's own sliding windows, soft cap and attention sinks still apply.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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

KEPT_BYTES = 2**28
"""Bytes of blocks kept for later layers: those of 16,384 tokens. Longer rows' are made again."""


@dataclass(frozen=True)
class Block:
    """A block of queries, the `[exact; quantized]` positions that it sees, and their mask."""

    queries: slice
    seen: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class TwoCopyMask:
    """The two-copy mask made from the model's own mask of one attention call, block by block.

    `attend` (whose mask None is plain causal), `device` and `length` (T queries and as many keys)
    identify the mask that it is made from.
    """

    attend: Attention
    cache: CacheLayout
    device: torch.device
    length: int
    _kept: list[Block] = field(default_factory=list)

    def blocks(self) -> Iterator[Block]:
        """The mask in blocks of queries, each with only the positions that it sees."""
        kept_bytes = sum(block.mask.nbytes for block in self._kept)
        for number, queries in enumerate(query_blocks(self.length)):
            if number < len(self._kept):
                yield self._kept[number]
                continue
            mask = self.rows(queries)
            seen = seen_keys(mask)
            block = Block(queries, seen, mask[..., seen])
            kept_bytes += block.mask.nbytes
            if kept_bytes <= KEPT_BYTES:
                self._kept.append(block)
            yield block

    def rows(self, queries: slice) -> torch.Tensor:
        """The two-copy mask `[B or 1, 1, q, 2T]` of some queries, of the own mask's kind (of all:
        34 GB for 131,072 tokens). Raises `UnsupportedModel` for a mask of another shape."""
        single = self._own_rows(queries)
        positions = torch.arange(self.length, device=self.device)[queries]
        return _both_copies(single, self.cache.exact_for(positions, self.length))

    def _own_rows(self, queries: slice) -> torch.Tensor:
        """The model's own mask `[B or 1, 1, q, T]` of some of the queries."""
        mask, length = self.attend.mask, self.length
        if mask is None:
            keys = torch.arange(length, device=self.device)
            return (keys <= keys[queries][:, None])[None, None]
        if len(mask.shape) != 4 or tuple(mask.shape[-2:]) != (length, length):
            raise UnsupportedModel(
                f"{type(self.attend.module).__name__} masks its attention in a way that cannot "
                "show it a second copy of its cache"
            )
        if isinstance(mask, LongMask):
            return mask.rows(queries)
        return mask[:, :, queries]

    def fits(self, attend: Attention, length: int, device: torch.device) -> bool:
        """Whether this mask was made from the same model mask, length and device; content
        counts."""
        if self.device != device or self.length != length:
            return False
        mask, other = self.attend.mask, attend.mask
        if mask is None or other is None or mask is other:
            return mask is other
        if isinstance(mask, LongMask):
            return isinstance(other, LongMask) and mask.equals(other)
        if isinstance(other, LongMask):
            return False
        same_kind = (mask.device, mask.dtype) == (other.device, other.dtype)
        return same_kind and torch.equal(mask, other)


def _both_copies(mask: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The mask over `[exact; quantized]`, from the model's own and from `exact` `[Q, T]`."""
    if mask.dtype == torch.bool:
        return torch.cat([mask & exact, mask & ~exact], dim=-1)
    hidden = torch.finfo(mask.dtype).min
    return torch.cat([mask.masked_fill(~exact, hidden), mask.masked_fill(exact, hidden)], dim=-1)


TOKENS = 16384
"""Tokens that are quantized at a time. The codec takes about ten times the bytes of its rows, most
of them to sort magnitudes: 5 GB for 131,072 tokens of 8 heads of 128."""


class SimulatedCodec(Sized, Protocol):
    """What a simulation asks of a codec: `RotatedCodec`, or a rival's."""

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` of a layer as the exact windows store them."""

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: Format
    ) -> torch.Tensor:
        """Rows `[B, H, T, D]` after the sink as they are read; incomplete groups as they are."""


@dataclass(frozen=True)
class Simulation:
    """A model that reads its keys and values as a codec stores them, through one cache."""

    codec: SimulatedCodec
    cache: CacheLayout
    geometry: Geometry
    layers: set[int]
    """Layers that read their cache in 2 bits; the others read it exact."""

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[None]:
        """Make the model read its cache through the codec while the context is open.

        Every attention call of a simulated layer goes to `_SimulatedAttention`, which builds both
        copies of keys and values, and returns the output from the 2-bit cache.
        """
        with intercept(model, _SimulatedAttention(self)):
            yield


class _SimulatedAttention:
    """Stands in for the model's attention function while a simulation runs."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.owners = {layer.index: layer.owner for layer in simulation.geometry}
        token_group = simulation.codec.token_group
        self.cache = replace(simulation.cache, token_group=token_group)
        self.masks: list[TwoCopyMask] = []

    def __call__(self, call: Call) -> torch.Tensor:
        """The attention output `[B, T, H_q, D_v]`, as an `Intercept`."""
        layer, query, key, attend = call.layer, call.query, call.key, call.attend
        if layer not in self.simulation.layers:
            return call.run()
        assert query.shape[2] == key.shape[2], "a simulation reads whole rows"
        keys, values = self._read_cache(call)
        mask = self._mask_for(attend, query)
        outputs = []
        # Each block of queries reads only the positions that it sees.
        for block in mask.blocks():
            read = replace(attend, mask=block.mask)
            seen_keys, seen_values = keys[:, :, block.seen], values[:, :, block.seen]
            outputs.append(read(query[:, :, block.queries], seen_keys, seen_values))
        return torch.cat(outputs, dim=1)

    def _mask_for(self, attend: Attention, query: torch.Tensor) -> TwoCopyMask:
        """The mask for an attention call, shared by all layers with the same mask and device."""
        length, device = query.shape[2], query.device
        for mask in self.masks:
            if mask.fits(attend, length, device):
                return mask
        # Masks of an earlier row of another length are not asked for again.
        self.masks = [mask for mask in self.masks if mask.length == length]
        self.masks.append(TwoCopyMask(attend, self.cache, device, length))
        return self.masks[-1]

    def _read_cache(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[exact; quantized]` of twice the length."""
        cached, owner, exact, quantized = cached_of(call), self.owners[call.layer], {}, {}
        for side, rows in cached.sides.items():
            exact[side], quantized[side] = self._both_copies(rows, owner, side)
        both = zip(cached.read(exact), cached.read(quantized), strict=True)
        keys, values = (torch.cat(copies, dim=2) for copies in both)
        return keys, values

    def _both_copies(
        self, rows: torch.Tensor, owner: int, side: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a side exact, and quantized as the layer that owns the cache stores them."""
        codec, cache = self.simulation.codec, self.simulation.cache
        exact = codec.keep_exact(rows, owner, side)
        # No query reads a quantized sink token. Groups of tokens begin after the sink.
        quantized, step = [], TOKENS // codec.token_group * codec.token_group
        for first in range(cache.sink, rows.shape[2], step):
            part = rows[:, :, first : first + step]
            quantized.append(codec.fake_quantize(part, owner, side, cache.format))
        return exact, torch.cat([exact[:, :, : cache.sink], *quantized], dim=2)
