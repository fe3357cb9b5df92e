"""Attention of a few new tokens over packed keys and values, in plain torch: the definition of the
kernel that reads codes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.transform import SegmentLayout


@dataclass(frozen=True)
class PackedSide:
    """The packed keys, or the packed values, of a layer."""

    blocks: Sequence[torch.Tensor]
    """At least one, uint8 `[B, bytes of a page]` each, contiguous, in token order."""
    layout: PageLayout | SegmentLayout
    matrix: torch.Tensor
    """float32 `[H, D, D]`: takes dequantized rows to the model's frame."""
    mean: torch.Tensor | None = None
    """float32 `[H, D]`, added to these rows."""
    table: torch.Tensor | None = None
    """int64 `[B, blocks or more]`: page n begins `n * unit` bytes after `base`. None: addresses."""
    base: int = 0
    unit: int = 1

    def addresses(self) -> torch.Tensor:
        """The table, or the address of every page, on the device of the blocks."""
        if self.table is not None:
            return self.table
        first = self.blocks[0]
        starts = torch.tensor([block.data_ptr() for block in self.blocks], device=first.device)
        return starts + torch.arange(len(first), device=first.device)[:, None] * self.layout.bytes

    def restore(self) -> torch.Tensor:
        """The rows of all pages in the model's frame `[B, H, T, D]`, in the matrix's type."""
        rows = [self.layout.dequantize(self.layout.view(block)) for block in self.blocks]
        restored = torch.cat(rows, dim=2).to(self.matrix.dtype) @ self.matrix
        return restored if self.mean is None else restored + self.mean[:, None]


@dataclass(frozen=True)
class PackedTokens:
    """The packed tokens of a layer."""

    key: PackedSide
    value: PackedSide
    lengths: torch.Tensor
    """int32 `[B]` on the device: how many tokens of each row are packed, from the first page on."""
    starts: torch.Tensor | None = None
    """int32 `[B]` on the device: how many of the first ones are not read. None: all are."""
    floors: torch.Tensor | None = None
    """int32 `[B]` on the device. With it, the exact window moves with the new tokens: a query reads
    one packed token less, and one of the tail more, than the next query does. All read the first
    `floors` packed tokens up to their own. Only with a tail that has `starts`."""


@dataclass(frozen=True)
class ExactWindow:
    """Tokens as the model computed them: `key` `[B, H, E, D]`, `value` `[B, H, E, D_v]`."""

    key: torch.Tensor
    value: torch.Tensor
    lengths: torch.Tensor | None = None
    """int32 `[B]` on the device: each row has the first so many of the E tokens. None: all."""
    starts: torch.Tensor | None = None
    """int32 `[B]` on the device: how many of the first ones are not read. None: all are."""
    slots: torch.Tensor | None = None
    """int32 `[B, N]` on the device. With it, `key` and `value` are pools `[slots, H, P, D]`, and a
    row has the tokens of its N slots in this order, so E is `N * P`."""

    @property
    def tokens(self) -> int:
        """The most tokens of a row (E)."""
        count = self.key.shape[2]
        return count if self.slots is None else count * self.slots.shape[1]

    def rows(self, side: str) -> torch.Tensor:
        """The keys or values `[B, H, E, D]`, copied if they are in slots."""
        rows: torch.Tensor = getattr(self, side)
        if self.slots is None:
            return rows
        return rows[self.slots.long()].transpose(1, 2).flatten(2, 3)


@dataclass(frozen=True)
class Scores:
    """How products of queries and keys become logits."""

    scale: float
    soft_cap: float | None = None
    """The bound of logits `tanh(logits / cap) * cap`, as in Gemma 2."""
    sinks: torch.Tensor | None = None
    """`[H_q]`: an attention sink of each query head, a logit without a value, as in gpt-oss."""


def attend(
    query: torch.Tensor, packed: PackedTokens, head: ExactWindow, tail: ExactWindow, scores: Scores
) -> torch.Tensor:
    """The attention output `[B, H_q, T, D_v]` of new tokens, in the type of their queries
    `[B, H_q, T, D]`. It is computed in float32, or in float64 for queries in float64.

    `head` holds the first tokens of a request, `packed` those after them, and `tail` the last ones,
    which end with the T new tokens. Each new token reads all tokens up to its own. A query without
    tokens gets zeros.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    new = query.shape[2]
    keys, values, masks = [], [], []
    # A query does not read the new tokens after its own, which end the tail.
    later = torch.arange(new - 1, -1, -1, device=query.device)
    lengths, moved = packed.lengths[:, None].expand(-1, new), torch.zeros_like(later)
    if packed.floors is not None:
        moved = torch.minimum(later, lengths - packed.floors[:, None])
        # No query reads packed tokens after its own, either.
        assert tail.starts is not None
        moved = torch.maximum(moved, later - (_counts(tail) - tail.starts)[:, None])
    for window in (head, tail):
        is_tail = window is tail
        starts = None if window.starts is None else window.starts[:, None] - moved * is_tail
        counts = _counts(window)[:, None] - later * is_tail
        keys.append(window.rows("key").to(dtype))
        values.append(window.rows("value").to(dtype))
        masks.append(_reads(window.tokens, starts, counts))
    keys.append(packed.key.restore().to(dtype))
    values.append(packed.value.restore().to(dtype))
    starts = None if packed.starts is None else packed.starts[:, None]
    masks.append(_reads(keys[-1].shape[2], starts, lengths - moved))
    # The order of tokens does not matter.
    read = torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 2)
    return attend_rows(query, *read, scores)[0]


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention output `[B, H_q, T, D_v]` of queries `[B, H_q, T, D]` over rows `[B, H, L, D]`,
    in the type of the queries, and the log-sum-exp of logits `[B, H_q, T]`. `mask`, boolean `[B, T,
    L]`, is True where a query reads a row. A query that reads none gets zeros, and minus
    infinity."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    # 0 times a value that is not finite is NaN, so its key is made NaN for its readers instead.
    is_bad = ~value.isfinite().all(-1, keepdim=True)
    key, value = key.masked_fill(is_bad, torch.nan), value.masked_fill(is_bad, 0)
    key = key.to(dtype).repeat_interleave(group, 1)
    value = value.to(dtype).repeat_interleave(group, 1)
    logits = query.to(dtype) @ key.mT * scores.scale
    if scores.soft_cap is not None:
        logits = torch.tanh(logits / scores.soft_cap) * scores.soft_cap
    logits = logits.masked_fill(~mask[:, None], -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(dtype)[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(-1)[..., : value.shape[2]]
    # A row of padding reads nothing.
    weights = weights.masked_fill(~mask.any(-1)[:, None, :, None], 0)
    return (weights @ value).to(query.dtype), logits.logsumexp(-1)


def _counts(window: ExactWindow) -> torch.Tensor:
    """How many tokens each row has, int64 `[B]`."""
    if window.lengths is None:
        batch = len(window.key) if window.slots is None else len(window.slots)
        return torch.full((batch,), window.tokens, device=window.key.device)
    return window.lengths.long()


def _reads(tokens: int, starts: torch.Tensor | None, counts: torch.Tensor) -> torch.Tensor:
    """Which tokens each query reads, boolean `[B, T, tokens]`: from `starts` `[B, T or 1]` to
    `counts` `[B, T]`."""
    position = torch.arange(tokens, device=counts.device)
    read = position < counts[..., None]
    return read if starts is None else read & (position >= starts[..., None])
