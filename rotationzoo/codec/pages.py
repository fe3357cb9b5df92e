"""Pages of packed rows: codes, scales and offsets of some tokens in one piece of memory."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from rotationzoo.codec import int2
from rotationzoo.codec.formats import Format

_ALIGNMENT = 16  # bytes: what a GPU loads at once


class Sections(NamedTuple):
    """The parts of packed rows, each by itself, so that a kernel reads aligned words: two bits of
    each code, uint8 `[B, H, T, D / 4]`, the third bits of the last channels, uint8
    `[B, H, T, fine channels / 8]`, and scales `[B, H, T / S, G]` and offsets of this shape, or
    `[B, H, T / S, 0]`, in the format's type."""

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
    """Scales of one head (G): of groups of channels, or of every channel where tokens share
    them."""
    tokens: int
    """Tokens of a page (P)."""
    format: Format
    tokens_per_scale: int = 1
    """Successive tokens that share a scale (S); P is a multiple of it."""

    @property
    def code_bytes(self) -> int:
        """Bytes of the first two bits of a row's codes: `dim / 4` in a format of 2 bits."""
        return self.format.row_bytes(self.dim) - self.third_bytes

    @property
    def third_bytes(self) -> int:
        """Bytes of a row's third bits."""
        return self.format.fine_channels // 8

    @property
    def third_start(self) -> int:
        """The byte at which the third bits begin. The codes begin at 0."""
        return _aligned(self.heads * self.tokens * self.code_bytes)

    @property
    def scale_start(self) -> int:
        """The byte at which the scales begin."""
        return self.third_start + _aligned(self.heads * self.tokens * self.third_bytes)

    @property
    def offset_start(self) -> int:
        """The byte at which the offsets begin."""
        return self.scale_start + _aligned(self._metadata_bytes(self.groups))

    @property
    def bytes(self) -> int:
        """The bytes of a page."""
        return self.offset_start + _aligned(self._metadata_bytes(self._offsets))

    def empty(self, batch: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A block of zeros, uint8 `[batch, bytes]`."""
        return torch.zeros(batch, self.bytes, dtype=torch.uint8, device=device)

    def view(self, block: torch.Tensor) -> Sections:
        """The sections of a block, of P tokens, which share its memory."""
        return Sections(
            self._bytes(block, 0, self.code_bytes),
            self._bytes(block, self.third_start, self.third_bytes),
            self._metadata(block, self.scale_start, self.groups),
            self._metadata(block, self.offset_start, self._offsets),
        )

    def split(self, stored: int2.Quantized) -> Sections:
        """The sections of rows with packed codes `[B, H, T, row bytes]`."""
        codes, thirds = stored.codes.split([self.code_bytes, self.third_bytes], dim=-1)
        return Sections(codes, thirds, stored.scale, stored.offset)

    def dequantize(self, stored: Sections) -> torch.Tensor:
        """Rows `[B, H, T, D]`, float32, of sections of any number of tokens."""
        packed = stored.codes
        if self.third_bytes:
            packed = torch.cat([packed, stored.thirds], dim=-1)
        codes = int2.unpack(packed, self.format)
        if self.tokens_per_scale == 1:
            return int2.dequantize(int2.Quantized(codes, stored.scale, stored.offset), self.format)
        # A channel takes the place of a row, cut into groups of tokens.
        swapped = int2.Quantized(codes.mT, stored.scale.mT, stored.offset.mT)
        return int2.dequantize(swapped, self.format).mT

    @property
    def _offsets(self) -> int:
        """Offsets of one head."""
        return self.groups * (self.format.metadata_numbers - 1)

    def _metadata_bytes(self, numbers: int) -> int:
        """Bytes of so many numbers of every head and token."""
        rows = self.heads * (self.tokens // self.tokens_per_scale)
        return rows * numbers * self.format.metadata_bits // 8

    def _bytes(self, block: torch.Tensor, start: int, width: int) -> torch.Tensor:
        section = block[:, start : start + self.heads * self.tokens * width]
        by_head: torch.Tensor = section.unflatten(1, (self.heads, self.tokens, width))
        return by_head

    def _metadata(self, block: torch.Tensor, start: int, numbers: int) -> torch.Tensor:
        section = block[:, start : start + self._metadata_bytes(numbers)]
        values = section.view(int2.METADATA_TYPES[self.format.metadata])
        rows = self.tokens // self.tokens_per_scale
        by_head: torch.Tensor = values.unflatten(1, (self.heads, rows, numbers))
        return by_head


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
