"""Pages of packed rows: codes, scales and offsets of some tokens in one piece of memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from rotationzoo.codec import int2
from rotationzoo.codec.formats import Format

_ALIGNMENT = 16  # bytes: what a GPU loads at once


class Sections(NamedTuple):
    """The parts of packed rows, each by itself, so that a kernel reads aligned words: two bits of
    each code, uint8 `[B, H, T, D / 4]`, the third bits of the last channels, uint8
    `[B, H, T, fine channels / 8]`, and scales `[B, H, T, G]` and offsets of this shape, or
    `[B, H, T, 0]`, in the format's type."""

    codes: torch.Tensor
    thirds: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor


@dataclass(frozen=True)
class PageLayout:
    """How the keys or values of successive tokens lie in a page: one row of a batch, all KV heads.

    `Sections` follow each other, and each starts at a multiple of 16 bytes. Those that a format
    has not take no bytes. A block uint8 `[B, bytes]` holds a page for each row of a batch, so that
    the address of a page is all that a kernel needs.
    """

    heads: int
    dim: int
    groups: int
    """Scales of one head (G), each of a group of channels."""
    tokens: int
    """Tokens of a page (P)."""
    format: Format

    @property
    def code_bytes(self) -> int:
        """Bytes of the first two bits of a row's codes: `dim / 4` in a format of 2 bits."""
        return self.format.row_bytes(self.dim) - self.third_bytes

    @property
    def third_bytes(self) -> int:
        """Bytes of a row's third bits."""
        return self.format.fine_channels // 8

    @property
    def row_bytes(self) -> list[int]:
        """Bytes of a row of each head, with its scales and offsets."""
        return [sum(width * type.itemsize for width, type in self._shapes)] * self.heads

    @cached_property
    def starts(self) -> list[int]:
        """The bytes at which the four sections begin, and the bytes of a page."""
        rows = self.heads * self.tokens
        sizes = (rows * width * type.itemsize for width, type in self._shapes)
        return [*accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)]

    @property
    def bytes(self) -> int:
        """The bytes of a page."""
        return self.starts[-1]

    def empty(self, batch: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A block of zeros, uint8 `[batch, bytes]`."""
        return torch.zeros(batch, self.bytes, dtype=torch.uint8, device=device)

    def view(self, block: torch.Tensor) -> Sections:
        """The sections of a block, of P tokens, which share its memory."""
        sections = []
        for start, (width, type) in zip(self.starts, self._shapes, strict=False):
            size = self.heads * self.tokens * width * type.itemsize
            section = block[:, start : start + size].view(type)
            sections.append(section.unflatten(1, (self.heads, self.tokens, width)))
        return Sections(*sections)

    def split(self, stored: int2.Quantized) -> Sections:
        """The sections of rows with packed codes `[B, H, T, row bytes]`."""
        codes, thirds = stored.codes.split([self.code_bytes, self.third_bytes], dim=-1)
        return Sections(codes, thirds, stored.scale, stored.offset)

    def dequantize(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows `[B, H, T, D]`, float32, of the four sections of any number of tokens."""
        packed, thirds, scale, offset = stored
        if self.third_bytes:
            packed = torch.cat([packed, thirds], dim=-1)
        codes = int2.unpack(packed, self.format)
        return int2.dequantize(int2.Quantized(codes, scale, offset), self.format)

    @property
    def _shapes(self) -> list[tuple[int, torch.dtype]]:
        """Numbers of a row, and their type, of each section."""
        metadata = int2.METADATA_TYPES[self.format.metadata]
        offsets = self.groups * (self.format.metadata_numbers - 1)
        return [
            (self.code_bytes, torch.uint8),
            (self.third_bytes, torch.uint8),
            (self.groups, metadata),
            (offsets, metadata),
        ]
