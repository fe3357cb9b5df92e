"""Cases of attention over packed codes, and attention in float64 to compare with."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from rotationzoo.codec import int2
from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens, Scores
from rotationzoo.codec.formats import FORMATS
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.transform import SegmentLayout
from rotationzoo.linalg.transform_coding import SEGMENT

SEGMENTS = "segments"
"""Random widths up to the case's bits. Of several heads, one has no keys and one no values."""
DIMS = (64, 80, 96, 112, 128, 160, 192, 256)


@dataclass(frozen=True)
class Case:
    """What one call of `attend` gets."""

    purpose: str
    """The group of cases that it is reported with."""
    format: str = "sglang"
    dim: int = 128
    value_dim: int | None = None
    group_size: int | None = None
    """Channels that share a scale."""
    bits: tuple[int, int] = (4, 4)
    """The most of a channel of keys, and of values, with segments."""
    kv_heads: int = 2
    group: int = 4
    """Query heads of each KV head."""
    new: int = 1
    lengths: tuple[int, ...] = (333, 70)
    """Packed tokens of each row of the batch."""
    head: tuple[int, ...] | int = 16
    """Tokens of the first window, for each row or for all."""
    tail: tuple[int, ...] | int = 40
    page: int = 64
    pooled: tuple[int, ...] = ()
    """How many of the packed tokens of each row are not read. With them, windows lie in slots of 32
    tokens, their first two tokens are not read, and tables count from a base."""
    floors: tuple[int, ...] = ()
    """How many packed tokens of each row every query reads: exact tokens move along with the new
    ones. Only with `pooled`."""
    query_type: torch.dtype = torch.bfloat16
    window_type: torch.dtype = torch.bfloat16
    soft_cap: float | None = None
    sinks: bool = False
    means: bool = False
    query_scale: float = 1.0
    key_scale: float = 1.0
    value_scale: float = 1.0
    uneven: float = 0.0
    """Standard deviation of the logarithm of each value row's magnitude."""
    equal_rows: bool = False
    """Whether all packed rows have the same scale, one that float16 does not hold."""
    peak: tuple[str, float] | None = None
    """Where a key points along the queries (`first`, `last`, `head` or `tail`; `packed`: all that
    are packed do), and how high its logit is above the others'."""
    unread: float = 1e4
    """What is in places that nobody may read."""
    splits: int | None = None
    replayed: bool = False
    """Whether the call is captured in a CUDA graph, and the packed lengths grow from 0 to theirs
    between capture and replay."""
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """The arguments of `attend`."""

    query: torch.Tensor
    packed: PackedTokens
    head: ExactWindow
    tail: ExactWindow
    scores: Scores

    def arguments(self) -> tuple[Any, ...]:
        return self.query, self.packed, self.head, self.tail, self.scores


class Drawing:
    """Draws the inputs of a case."""

    def __init__(self, case: Case, device: str):
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(case.seed)
        self.batch = len(case.lengths)
        self.value_dim = case.value_dim or case.dim

    def inputs(self) -> Inputs:
        case = self.case
        base = self.normal(self.batch, case.kv_heads, 1, 1, case.dim)
        noise = self.normal(self.batch, case.kv_heads, case.group, case.new, case.dim)
        # With a peak, all queries of a group point the same way but for a little.
        query = base + 0.1 * noise if case.peak else noise
        query = (query * case.query_scale).flatten(1, 2).to(case.query_type)
        self.direction = base[:, :, 0, 0]
        packed, head, tail = self.packed(), self.window("head"), self.window("tail")
        sinks = self.normal(case.kv_heads * case.group) * 2 + 3 if case.sinks else None
        return Inputs(query, packed, head, tail, Scores(case.dim**-0.5, case.soft_cap, sinks))

    def ints(self, numbers: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=self.device)

    def rows(self, side: str, tokens: int) -> torch.Tensor:
        """Keys or values `[B, H, T, D]`, float32, in the model's frame."""
        case, dim = self.case, self.case.dim if side == "key" else self.value_dim
        rows = self.normal(self.batch, case.kv_heads, tokens, dim)
        if side == "key":
            return rows * case.key_scale
        return rows * case.value_scale * (case.uneven * self.normal(*rows.shape[:3], 1)).exp()

    def peak(self, place: str, keys: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Keys with the one that a peak asks for, if it lies here."""
        if self.case.peak is None or self.case.peak[0] != place:
            return keys
        # The logit of a key that equals its query is about the root of the head dimension.
        height = self.case.peak[1] / math.sqrt(self.case.dim) / self.case.query_scale
        if place == "packed":
            return keys + height * self.direction[:, :, None]
        index = [max(0, count - 1) if place in ("last", "tail") else 0 for count in counts]
        for row, token in enumerate(index):
            keys[row, :, token] = height * self.direction[row]
        return keys

    def packed(self) -> PackedTokens:
        case = self.case
        count = max(1, -(-max(case.lengths) // case.page)) + 1  # and a page that nobody reads
        sides = []
        for side, layout in zip(("key", "value"), self.layouts(), strict=True):
            rows = self.rows(side, count * case.page)
            if side == "key":
                for place in ("first", "last", "packed"):
                    rows = self.peak(place, rows, list(case.lengths))
            mean = self.normal(case.kv_heads, rows.shape[-1]) if case.means else None
            sides.append(self.side(layout, rows, mean))
        moved = (self.ints(each) if each else None for each in (case.pooled, case.floors))
        return PackedTokens(*sides, self.ints(case.lengths), *moved)

    def layouts(self) -> tuple[PageLayout, PageLayout] | tuple[SegmentLayout, SegmentLayout]:
        case = self.case
        if case.format == SEGMENTS:
            return self.segments(0), self.segments(1)
        groups, format = case.dim // (case.group_size or case.dim), FORMATS[case.format]
        key = PageLayout(case.kv_heads, case.dim, groups, case.page, format)
        groups = self.value_dim // (case.group_size or self.value_dim)
        return key, replace(key, dim=self.value_dim, groups=groups)

    def segments(self, side: int) -> SegmentLayout:
        case, dim = self.case, (self.case.dim, self.value_dim)[side]
        generator = torch.Generator().manual_seed(case.seed + side)
        size = case.kv_heads, dim // SEGMENT
        widths = torch.randint(0, case.bits[side] + 1, size, generator=generator)
        if case.kv_heads > 1:
            widths[-side] = 0
        ordered = widths.sort(descending=True).values
        return SegmentLayout(tuple(map(tuple, ordered.tolist())), case.page)

    def side(
        self, layout: PageLayout | SegmentLayout, rows: torch.Tensor, mean: torch.Tensor | None
    ) -> PackedSide:
        """Rows in pages, stored in a frame of their own by a matrix that is not orthogonal."""
        dim, heads = layout.dim, layout.heads
        rotation = torch.linalg.qr(self.normal(heads, dim, dim)).Q
        scales = (0.3 * self.normal(heads, dim, 1)).exp()
        centered = rows if mean is None else rows - mean[:, None]
        if isinstance(layout, SegmentLayout):  # scales are the steps
            widths = torch.tensor(layout.widths, device=self.device)
            scales *= 4 / (1 << widths).repeat_interleave(SEGMENT, 1)[..., None]
        channels = centered @ (rotation / scales.mT)
        if isinstance(layout, SegmentLayout):
            parts = layout.pack(*layout.quantize(channels, scales[..., 0]))
        else:
            group = layout.dim // layout.groups
            parts = int2.quantize(channels, 0.96, group, layout.format)
            parts = parts._replace(codes=int2.pack(parts.codes, layout.format))
            if self.case.equal_rows:
                parts.scale.fill_(1.4142)
                parts.offset.fill_(1.5)
        count = rows.shape[2] // layout.tokens
        memory = layout.empty(self.batch * count, self.device).unflatten(0, (count, self.batch))
        blocks = list(memory.unbind())
        for page, block in enumerate(blocks):
            sections, first = layout.view(block), page * layout.tokens
            for section, rows_of_all in zip(sections, parts, strict=True):
                section[:] = rows_of_all[:, :, first : first + layout.tokens]
            self.spoil(layout, sections, first)
        packed = PackedSide(blocks, layout, (scales * rotation.mT).contiguous(), mean)
        if self.case.replayed:  # a table on the device, with columns to spare
            packed = replace(packed, table=pad(packed.addresses(), (0, 3)))
        if self.case.pooled:
            base, unit = memory.data_ptr(), layout.bytes
            numbers = (packed.addresses() - base) // unit
            packed = replace(packed, table=numbers, base=base, unit=unit)
        return packed

    def spoil(
        self, layout: PageLayout, sections: int2.Quantized | list[torch.Tensor], first: int
    ) -> None:
        """Overwrite what is beyond the length of each row."""
        for row, length in enumerate(self.case.lengths):
            filled = max(0, length - first)
            if isinstance(sections, list):  # without a number
                skipped = max(0, self.case.pooled[row] - first) if self.case.pooled else 0
                for section in sections:
                    section[row, :, filled:] = section[row, :, :skipped] = 255
                continue
            sections.codes[row, :, filled:] = 255
            sections.scale[row, :, filled:] = sections.offset[row, :, filled:] = self.case.unread
            if self.case.pooled:
                skipped = max(0, self.case.pooled[row] - first)
                sections.scale[row, :, :skipped] = self.case.unread

    def window(self, part: str) -> ExactWindow:
        case = self.case
        counts = getattr(case, part)
        lengths = self.ints(counts) if isinstance(counts, tuple) else None
        every = [*counts] if isinstance(counts, tuple) else [counts] * self.batch
        key, value = (self.rows(side, max(every)) for side in ("key", "value"))
        if max(every):
            key = self.peak(part, key, every)
        for row, count in enumerate(every):
            key[row, :, count:] = value[row, :, count:] = case.unread
        window = ExactWindow(key.to(case.window_type), value.to(case.window_type), lengths)
        return self.in_slots(window, part == "tail") if case.pooled else window

    def in_slots(self, window: ExactWindow, is_tail: bool) -> ExactWindow:
        """The same in a pool, where the first two tokens of a row are not read, nor, by its last
        query, those that only earlier queries read exact."""
        pieces = -(-window.key.shape[2] // 32)
        slots = torch.randperm(self.batch * pieces, generator=self.generator, device=self.device)
        pools = []
        for rows in (window.key, window.value):
            rows = pad(rows, (0, 0, 0, 32 * pieces - rows.shape[2]), value=self.case.unread)
            rows[:, :, :2] = self.case.unread
            by_slot = rows.unflatten(2, (pieces, 32)).transpose(1, 2).flatten(0, 1)
            pools.append(by_slot[slots.argsort()].contiguous())
        lengths = window.lengths
        if lengths is None:
            lengths = torch.full((self.batch,), window.key.shape[2], device=self.device)
        starts = lengths.clamp(max=2).int()
        if is_tail and self.case.floors:
            moved = self.ints(self.case.lengths) - self.ints(self.case.floors)
            starts += moved.clamp(max=self.case.new - 1)
        return ExactWindow(*pools, lengths.int(), starts, slots.int().unflatten(0, (-1, pieces)))


def reference(inputs: Inputs) -> torch.Tensor:
    """What `attend` should return, in float64: each query alone, over the tokens that it reads."""
    rows, new = range(len(inputs.query)), range(inputs.query.shape[2])
    return torch.stack([torch.stack([_read(inputs, row, at) for at in new], 1) for row in rows])


def _read(inputs: Inputs, row: int, at: int) -> torch.Tensor:
    """What query number `at` of a row of the batch reads `[H_q, D_v]`, float64."""
    packed, heads, new = inputs.packed, *inputs.query.shape[1:3]
    later = new - 1 - at
    length = int(packed.lengths[row])
    moved = 0 if packed.floors is None else min(later, length - int(packed.floors[row]))
    parts = []
    for window in (inputs.head, inputs.tail):
        is_tail = window is inputs.tail
        count = window.tokens if window.lengths is None else int(window.lengths[row])
        first = 0 if window.starts is None else int(window.starts[row])
        read = slice(first - moved * is_tail, max(count - later * is_tail, 0))
        rows = [window.rows(side)[row, :, read] for side in ("key", "value")]
        parts.append([each.double() for each in rows])
    first = 0 if packed.starts is None else int(packed.starts[row])
    sides = packed.key, packed.value
    parts.append([restore(side, row, length - moved)[:, first:] for side in sides])
    key, value = (torch.cat(sides, 1) for sides in zip(*parts, strict=True))
    group = heads // key.shape[0]
    query = inputs.query[row, :, at].double().unflatten(0, (-1, group))
    logits = query @ key.mT * inputs.scores.scale
    cap, sinks = inputs.scores.soft_cap, inputs.scores.sinks
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().view(-1, group, 1)], -1)
    weights = logits.softmax(-1)[..., : key.shape[1]]
    return (weights @ value).flatten(0, 1)


def restore(side: PackedSide, row: int, length: int) -> torch.Tensor:
    """The first rows `[H, T, D]` of one row of the batch in the model's frame, float64."""
    pages = [side.layout.view(block[row : row + 1]) for block in side.blocks]
    rows = torch.cat([side.layout.dequantize(page)[0] for page in pages], 1)[:, :length]
    restored = rows.double() @ side.matrix.double()
    return restored if side.mean is None else restored + side.mean.double()[:, None]


@dataclass(frozen=True)
class Error:
    """Norms of differences over norms of the reference."""

    row: float
    """Of the worst row of the batch, over all heads, new tokens and channels."""
    head: float
    """Of the worst single vector, one head of one new token. NaN anywhere makes both infinite."""
    beyond: float
    """Of the worst row, without what rounding the output to its type costs by itself."""


def error_of(output: torch.Tensor, expected: torch.Tensor) -> Error:
    """The error of an output `[B, H_q, T, D_v]`."""
    difference = (output.double() - expected).nan_to_num(torch.inf, torch.inf, torch.inf)
    rows = difference.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    heads = difference.norm(dim=-1) / expected.norm(dim=-1)
    rounded = (expected.to(output.dtype).double() - expected).flatten(1).norm(dim=1)
    beyond = (rows**2 - (rounded / expected.flatten(1).norm(dim=1)) ** 2).clamp(min=0).sqrt()
    return Error(rows.max().item(), heads.max().item(), beyond.max().item())
