"""Attention masks over a cache that holds every position twice, as `[exact; quantized]`.

Queries soon after a position read it exact; later queries read it quantized. For each position that
the model's own mask lets a query see, the two-copy mask therefore shows the query exactly one of
the two copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.capture import Attention
from rotationzoo.model.long_masks import LongMask, query_blocks, seen_keys

KEPT_BYTES = 2**28
"""Bytes of blocks that are kept for the layers that follow: all blocks of 16,384 tokens. Blocks of
longer rows, 8.6 GB at 131,072 tokens, are made for each layer again."""


@dataclass(frozen=True)
class Block:
    """A block of queries, the positions of `[exact; quantized]` that at least one of them sees, and
    the mask between them."""

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
        """The mask, split by queries: those of a block see no later position, and one of the two
        copies of nearly every earlier position."""
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

    def rows(self, queries: slice | torch.Tensor) -> torch.Tensor:
        """The two-copy mask `[B or 1, 1, q, 2T]` of some of the T queries, boolean or additive like
        the model's own: of all, 34 GB for 131,072 tokens. Raises `UnsupportedModel` for a mask of
        another shape than transformers makes."""
        single = self._own_rows(queries)
        positions = torch.arange(self.length, device=self.device)[queries]
        return _both_copies(single, self.cache.exact_for(positions, self.length))

    def _own_rows(self, queries: slice | torch.Tensor) -> torch.Tensor:
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
            return mask.rows(queries) if isinstance(queries, slice) else mask.at(queries)
        return mask[:, :, queries]

    def fits(self, attend: Attention, length: int, device: torch.device) -> bool:
        """Whether this mask was made from the same model mask, for as many positions, on the same
        device. Layers on a second device each receive their own copy, so content counts."""
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


class TwoCopyMasks:
    """The two-copy masks of a model, each shared by all layers with the same mask and device."""

    def __init__(self, cache: CacheLayout):
        self.cache = cache
        self._masks: list[TwoCopyMask] = []

    def mask_for(self, attend: Attention, query: torch.Tensor) -> TwoCopyMask:
        """The two-copy mask for one attention call."""
        length, device = query.shape[2], query.device
        for mask in self._masks:
            if mask.fits(attend, length, device):
                return mask
        # Masks of an earlier row of another length are not asked for again.
        self._masks = [mask for mask in self._masks if mask.length == length]
        mask = TwoCopyMask(attend, self.cache, device, length)
        self._masks.append(mask)
        return mask


def _both_copies(mask: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The mask over `[exact; quantized]` of queries with the model's own mask `[B or 1, 1, Q, T]`,
    which read the positions `exact` `[Q, T]` exact."""
    if mask.dtype == torch.bool:
        return torch.cat([mask & exact, mask & ~exact], dim=-1)
    hidden = torch.finfo(mask.dtype).min
    return torch.cat([mask.masked_fill(~exact, hidden), mask.masked_fill(exact, hidden)], dim=-1)


def as_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a boolean mask (True = attend) to one that is added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    hidden = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, hidden)
