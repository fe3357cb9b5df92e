"""Attention masks over a cache that holds every position twice, as `[exact; quantized]`.

Queries soon after a position read it exact; later queries read it quantized. For each position that
the model's own mask lets a query see, the two-copy mask therefore shows the query exactly one of
the two copies.
"""

from dataclasses import dataclass

import torch

from rotationzoo.cache.windows import Cache
from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.capture import Attention

# Smaller blocks skip more hidden positions but call the model's attention more often.
BLOCK_QUERIES = 512


@dataclass(frozen=True)
class Block:
    """A block of queries, the positions of `[exact; quantized]` that at least one of them sees, and
    the mask between them."""

    queries: slice
    seen: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class TwoCopyMask:
    """The two-copy mask made from one of the model's own masks.

    `mask` (None: plain causal), `device` and `lengths` (Q queries, T keys) identify the mask that
    it was made from. `whole` is the two-copy mask `[B or 1, 1, Q, 2T]`, and `blocks` is the same
    mask split by queries.
    """

    mask: torch.Tensor | None
    device: torch.device
    lengths: tuple[int, int]
    whole: torch.Tensor
    blocks: list[Block]

    def fits(self, attend: Attention, lengths: tuple[int, int], device: torch.device) -> bool:
        """Whether this mask was made from the same model mask, for as many queries and keys, on the
        same device.

        Masks are compared by content, because layers on a second device each receive their own
        copy.
        """
        if self.device != device or self.lengths != lengths:
            return False
        mask, other = self.mask, attend.mask
        if mask is None or other is None or mask is other:
            return mask is other
        same_kind = (mask.device, mask.dtype) == (other.device, other.dtype)
        return same_kind and torch.equal(mask, other)


class TwoCopyMasks:
    """The two-copy masks of a model, each made once and shared by all layers with the same mask and
    device."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self._masks: list[TwoCopyMask] = []

    def mask_for(self, attend: Attention, query: torch.Tensor, length: int) -> TwoCopyMask:
        """The two-copy mask for one attention call over `length` keys. Raises `UnsupportedModel` as
        `two_copy_mask` does."""
        lengths, device = (query.shape[2], length), query.device
        for mask in self._masks:
            if mask.fits(attend, lengths, device):
                return mask
        # Nobody asks again for the masks of an earlier row, or of an answer before its last token.
        self._masks = [mask for mask in self._masks if mask.lengths == lengths]
        whole = two_copy_mask(attend, query, self.cache, length)
        mask = TwoCopyMask(attend.mask, device, lengths, whole, split_into_blocks(whole))
        self._masks.append(mask)
        return mask


def two_copy_mask(
    attend: Attention, query: torch.Tensor, cache: Cache, length: int | None = None
) -> torch.Tensor:
    """The mask `[B or 1, 1, Q, 2T]` that shows each query one copy of each position that it may
    see.

    The Q queries are the last of T = `length` positions: all of them (None), or those whose
    predecessors the model reads from its own KV cache. The mask is boolean or additive, like the
    model's own. Raises `UnsupportedModel` for any other kind of mask.
    """
    queries, mask = query.shape[2], attend.mask
    length = length or queries
    if mask is None:
        every = torch.ones(queries, length, dtype=torch.bool, device=query.device)
        mask = every.tril(length - queries)[None, None]
    if mask.ndim != 4 or mask.shape[-2:] != (queries, length):
        name = type(attend.module).__name__
        raise UnsupportedModel(
            f"{name} masks its attention in a way that cannot show it a second copy of its cache"
        )
    exact = cache.exact(length, query.device, queries)
    if mask.dtype == torch.bool:
        return torch.cat([mask & exact, mask & ~exact], dim=-1)
    hidden = torch.finfo(mask.dtype).min
    return torch.cat([mask.masked_fill(~exact, hidden), mask.masked_fill(exact, hidden)], dim=-1)


def mask_of_queries(attend: Attention, positions: torch.Tensor, length: int) -> torch.Tensor:
    """The model's own mask `[B or 1, 1, Q, T]` of the queries at some positions `[Q]` of rows of
    `length` tokens, float32 and additive. Raises `UnsupportedModel` as `two_copy_mask` does."""
    mask = attend.mask
    if mask is None:
        # Only the rows that are asked for: the whole mask of a long text takes gigabytes.
        keys = torch.arange(length, device=positions.device)
        return as_additive((keys <= positions[:, None])[None, None], torch.float32)
    if mask.ndim != 4 or mask.shape[-2:] != (length, length):
        name = type(attend.module).__name__
        raise UnsupportedModel(f"{name} masks its attention in a way that single queries cannot be")
    return as_additive(mask[:, :, positions], torch.float32)


def split_into_blocks(mask: torch.Tensor) -> list[Block]:
    """Split a mask `[B or 1, 1, Q, 2T]` into blocks of queries.

    A block does not need to read all 2T positions. Later positions are hidden from all of its
    queries, and so is one of the two copies of nearly every earlier position.
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
    """Convert a boolean mask (True = attend) to one that is added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    hidden = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, hidden)
