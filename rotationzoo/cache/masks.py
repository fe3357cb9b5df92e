"""Attention masks over a cache that holds every position twice, `[exact; quantized]`.

A position is read exact by some queries and quantized by later ones. The mask therefore shows each
query one of the two copies of each position that the model's own mask shows it.
"""

from dataclasses import dataclass

import torch

from rotationzoo.cache.windows import Cache
from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.capture import Attention

BLOCK_QUERIES = 512


@dataclass(frozen=True)
class Block:
    """Queries that read together, the positions of `[exact; quantized]` that any of them sees, and
    the mask between them."""

    queries: slice
    seen: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class TwoCopyMask:
    """A model's own `mask` for rows of `length` tokens on a device (None: plain causal), and the
    mask that shows each query one copy of each position, `[B or 1, 1, T, 2T]`, with its blocks."""

    mask: torch.Tensor | None
    device: torch.device
    length: int
    whole: torch.Tensor
    blocks: list[Block]

    def fits(self, attend: Attention, query: torch.Tensor) -> bool:
        """Whether it was made of the same mask, for as many queries on the same device.

        Masks are compared by content: layers on a second device are each handed a copy.
        """
        if self.device != query.device or self.length != query.shape[2]:
            return False
        mask, other = self.mask, attend.mask
        if mask is None or other is None or mask is other:
            return mask is other
        same_kind = (mask.device, mask.dtype) == (other.device, other.dtype)
        return same_kind and torch.equal(mask, other)


class TwoCopyMasks:
    """The two-copy masks of a model, made once for all layers on a device that share a mask."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self._masks: list[TwoCopyMask] = []

    def mask_for(self, attend: Attention, query: torch.Tensor) -> TwoCopyMask:
        """The mask for one attention call. Raises `UnsupportedModel`."""
        for mask in self._masks:
            if mask.fits(attend, query):
                return mask
        whole = two_copy_mask(attend, query, self.cache)
        blocks = split_into_blocks(whole)
        mask = TwoCopyMask(attend.mask, query.device, query.shape[2], whole, blocks)
        self._masks.append(mask)
        return mask


def two_copy_mask(attend: Attention, query: torch.Tensor, cache: Cache) -> torch.Tensor:
    """The mask `[B or 1, 1, T, 2T]` that shows each query one copy of each position that the model
    shows it, boolean or additive as the model's own. Raises `UnsupportedModel` for masks of another
    kind."""
    length, mask = query.shape[2], attend.mask
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.ndim != 4 or mask.shape[-2:] != (length, length):
        name = type(attend.module).__name__
        raise UnsupportedModel(
            f"{name} masks its attention in a way that cannot show it a second copy of its cache"
        )
    exact = cache.exact(length, query.device)
    if mask.dtype == torch.bool:
        return torch.cat([mask & exact, mask & ~exact], dim=-1)
    hidden = torch.finfo(mask.dtype).min
    return torch.cat([mask.masked_fill(~exact, hidden), mask.masked_fill(exact, hidden)], dim=-1)


def split_into_blocks(mask: torch.Tensor) -> list[Block]:
    """A mask `[B or 1, 1, T, 2T]` in blocks of queries.

    A block need not read all 2T positions: what comes later is hidden from all of its queries, and
    so is one copy or the other of nearly everything before.
    """
    blocks = []
    for start in range(0, mask.shape[2], BLOCK_QUERIES):
        queries = slice(start, start + BLOCK_QUERIES)
        part = mask[:, :, queries]
        visible = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min
        seen = visible.flatten(0, 2).any(0).nonzero()[:, 0]
        blocks.append(Block(queries, seen, part[..., seen]))
    return blocks


def as_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask (True = attend) as numbers to add to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    hidden = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, hidden)
