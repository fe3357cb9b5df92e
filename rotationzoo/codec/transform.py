"""Rows whose channels have 0 to 8 bits each: from rows to bytes, and back, in plain torch.

A row of one KV head becomes channels (`linalg.transform_coding`), the widest first, each in units
of its step. The four channels of a segment have the same width. One of fifteen scales per row
multiplies all steps: the one with the smallest squared error. The level of a code of w bits is
`(code + 1/2 - 2^(w-1)) * scale`, without an offset. A row that cannot be stored has the scale
number 15, and reads back as NaN.

A row is whole words of 32 bits. The codes of a segment lie in the four bytes of a word, at the same
bits of each, so that one mask takes all four. Byte j of each word is the next eight bits of stream
j. A stream begins with bit j of the scale's number, and `arrange` places the segments in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch

from rotationzoo.codec.formats import SEGMENTS, Format
from rotationzoo.codec.int2 import find_refused
from rotationzoo.linalg.transform_coding import SEGMENT, WORD

_BYTES = 0x01010101
SCALES = tuple(0.5 * 5.6 ** (number / 14) for number in range(15))
"""From 0.5 to 2.8, in equal ratios."""
NO_NUMBER = 15


class Tables(NamedTuple):
    """What widths determine, on a device."""

    halves: torch.Tensor
    """Half the number of codes of each channel, float32 `[H, 1, D]`."""
    widths: torch.Tensor
    """int64 `[H, D / SEGMENT]`."""
    starts: torch.Tensor
    """The first bit of each segment in its streams, int64 `[H, D / SEGMENT]`."""
    scales: torch.Tensor
    """float32 `[16]`."""


@dataclass(frozen=True)
class SegmentLayout:
    """How one side of a layer is stored, with the methods of `page_layout.PageLayout`. A page holds
    the rows of one head after those of another, each from a multiple of 16 bytes on."""

    widths: tuple[tuple[int, ...], ...]
    """Bits of the channels of each segment, descending, of each KV head."""
    tokens: int
    """Tokens of a page."""
    groups: ClassVar[int] = 1
    format: ClassVar[Format] = SEGMENTS

    @classmethod
    def of(cls, widths: torch.Tensor, tokens: int = 1) -> "SegmentLayout":
        """The layout of widths `[H, D / SEGMENT]`."""
        return cls(tuple(map(tuple, widths.tolist())), tokens)

    @cached_property
    def _hash(self) -> int:  # computed once, because each launch of a kernel asks for it
        return hash((self.widths, self.tokens))

    def __hash__(self) -> int:
        return self._hash

    @property
    def heads(self) -> int:
        return len(self.widths)

    @property
    def dim(self) -> int:
        return SEGMENT * len(self.widths[0])

    @cached_property
    def row_bytes(self) -> list[int]:
        """Bytes of a row of each head: 0 if no channel has bits."""
        taken = map(sum, self.widths)
        return [-(-(1 + bits) // 8) * (WORD // 8) * (bits > 0) for bits in taken]

    @cached_property
    def starts(self) -> list[int]:
        """The first byte of the rows of each head, and the bytes of a page."""
        sizes = (-(-self.tokens * size // 16) * 16 for size in self.row_bytes)
        return [*accumulate(sizes, initial=0)]

    @property
    def bytes(self) -> int:
        return self.starts[-1]

    def places(self, device: torch.device) -> torch.Tensor:
        """What kernels read of each head, int32 `[H, 2 + D / SEGMENT]`: the first byte of its rows
        in a page, the bytes of a row, and for each segment, width plus 16 times first bit."""
        return _places(self, device)

    def empty(self, batch: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A block of zeros, uint8 `[batch, bytes]`."""
        return torch.zeros(batch, self.bytes, dtype=torch.uint8, device=device)

    def view(self, block: torch.Tensor) -> list[torch.Tensor]:
        """The rows `[B, 1, tokens, row bytes]` of each head in a block, which share its memory."""
        sections = []
        for start, size in zip(self.starts, self.row_bytes, strict=False):
            section = block[:, start : start + self.tokens * size]
            sections.append(section.unflatten(1, (1, self.tokens, size)))
        return sections

    def dequantize(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Channels in steps `[B, H, T, D]`, float32, of the rows of each head."""
        return self.levels(*self.unpack(stored))

    def quantize(
        self, channels: torch.Tensor, steps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes `[B, H, T, D]` and the numbers of scales `[B, H, T]`, both uint8, of channels
        in steps `[B, H, T, D]`, with the steps `[H, D]`. Every operation is rounded on its own."""
        tables, steps = _tables(self.widths, channels.device), steps.to(channels.device)[:, None]
        best = torch.zeros_like(channels[..., 0])
        smallest = torch.full_like(best, torch.inf)
        for number, scale in enumerate(tables.scales[:NO_NUMBER]):
            read = (_nearest(channels, scale, tables.halves) + 0.5) * scale
            loss = sum_in_halves(((read - channels) * steps).square())
            best = torch.where(loss < smallest, number, best)
            smallest = torch.minimum(loss, smallest)
        is_bad = find_refused(channels)
        scale = tables.scales[best.long()][..., None]
        codes = _nearest(channels, scale, tables.halves) + tables.halves
        codes = codes.masked_fill(is_bad[..., None], 0)
        return codes.to(torch.uint8), best.masked_fill(is_bad, NO_NUMBER).to(torch.uint8)

    def levels(self, codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Channels in steps `[B, H, T, D]`, float32, of codes and numbers of scales."""
        tables = _tables(self.widths, codes.device)
        return (codes.float() + 0.5 - tables.halves) * tables.scales[numbers.long()][..., None]

    def pack(self, codes: torch.Tensor, numbers: torch.Tensor) -> list[torch.Tensor]:
        """The rows `[B, 1, T, row bytes]` of each head."""
        tables, rows = _tables(self.widths, codes.device), []
        byte = torch.arange(SEGMENT, device=codes.device)
        for head, size in enumerate(self.row_bytes):
            segments = (codes[:, head].long().unflatten(-1, (-1, SEGMENT)) << 8 * byte).sum(-1)
            word, bit = tables.starts[head] // 8, tables.starts[head] % 8
            words = segments.new_zeros(*segments.shape[:2], size // 4 + 2)
            words[..., 0] = ((numbers[:, head, :, None].long() >> byte & 1) << 8 * byte).sum(-1)
            # The bits beyond the top of a byte go to the bottom of the next word.
            words.index_add_(-1, word, segments << bit & _BYTES * (0xFF << bit & 0xFF))
            words.index_add_(-1, word + 1, segments >> 8 - bit & _BYTES * ((1 << bit) - 1))
            data = words[..., : size // 4].to(torch.int32).contiguous().view(torch.uint8)
            rows.append(data[:, None])
        return rows

    def unpack(self, stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes `[B, H, T, D]` and scale numbers `[B, H, T]`, uint8, of the rows of each head."""
        tables = _tables(self.widths, stored[0].device)
        byte = torch.arange(SEGMENT, device=stored[0].device)
        codes, numbers = [], []
        for head, rows in enumerate(stored):
            batch, _, tokens, size = rows.shape
            # A copy, because a view as int32 needs aligned memory.
            flat = rows.flatten().clone().view(torch.int32).long() & 0xFFFFFFFF
            words = torch.nn.functional.pad(flat.view(batch, tokens, size // 4), (0, 2))
            word, bit = tables.starts[head] // 8, tables.starts[head] % 8
            lower = words[..., word] >> bit & _BYTES * (0xFF >> bit)
            upper = words[..., word + 1] << 8 - bit & _BYTES * (0xFF << 8 - bit & 0xFF)
            mask = (1 << tables.widths[head][:, None]) - 1
            codes.append(((lower | upper)[..., None] >> 8 * byte & mask).flatten(-2))
            numbers.append(((words[..., :1] >> 8 * byte & 1) << byte).sum(-1))
        return torch.stack(codes, 1).to(torch.uint8), torch.stack(numbers, 1).to(torch.uint8)


def _nearest(channels: torch.Tensor, scale: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    """The nearest codes, less their halves."""
    return (channels / scale).floor().maximum(-halves).minimum(halves - 1)


def arrange(widths: Sequence[int]) -> list[int]:
    """The first bit of each segment in its streams, from descending widths. Each byte gets the
    widest segments that fit, the narrowest at the bottom. If none fits, the widest is split."""
    starts, end = [0] * len(widths), 1
    left = [segment for segment, width in enumerate(widths) if width]
    while left:
        room, chosen = 8 - end % 8, list[int]()
        for segment in left:
            if widths[segment] <= room:
                chosen.insert(0, segment)
                room -= widths[segment]
        left = [segment for segment in left if segment not in chosen]
        if room and left:
            chosen.append(left.pop(0))
        for segment in chosen:
            starts[segment], end = end, end + widths[segment]
    return starts


def sum_in_halves(numbers: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, in halves, an order that a kernel can follow: the second
    half is added to the first until one number is left."""
    count = 1 << math.ceil(math.log2(numbers.shape[-1]))
    numbers = torch.nn.functional.pad(numbers, (0, count - numbers.shape[-1]))
    while count > 1:
        count //= 2
        numbers = numbers[..., :count] + numbers[..., count:]
    return numbers[..., 0]


@lru_cache(maxsize=1024)
def _places(layout: SegmentLayout, device: torch.device) -> torch.Tensor:
    tables = _tables(layout.widths, torch.device("cpu"))
    heads = torch.tensor([layout.starts[:-1], layout.row_bytes]).T
    segments = tables.widths + 16 * tables.starts
    return torch.cat([heads, segments], 1).to(device, torch.int32)


@cache
def _tables(widths: tuple[tuple[int, ...], ...], device: torch.device) -> Tables:
    bits = torch.tensor(widths, device=device)
    starts = torch.tensor([*map(arrange, widths)], device=device)
    halves = (1 << bits).float().repeat_interleave(SEGMENT, dim=-1)[:, None] / 2
    return Tables(halves, bits, starts, list_scales(device))


@cache
def list_scales(device: torch.device) -> torch.Tensor:
    """The scale of each number, float32 `[16]`; NaN for `NO_NUMBER`."""
    return torch.tensor([*SCALES, torch.nan], device=device)
