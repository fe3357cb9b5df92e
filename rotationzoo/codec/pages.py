"""Pages of packed rows: codes, scales and offsets of some tokens in one piece of memory."""

from dataclasses import dataclass

import torch

from rotationzoo.codec import int2
from rotationzoo.codec.formats import Format

_ALIGNMENT = 16  # bytes: what a GPU loads at once


@dataclass(frozen=True)
class PageLayout:
    """How the keys or values of successive tokens lie in a page: one row of a batch, all KV heads.

    Sections follow each other, and each starts at a multiple of 16 bytes: codes uint8
    `[H, P, row bytes]`, scales `[H, P / S, G]` and, if the format has some, offsets of the same
    shape, in the format's type. A block uint8 `[B, bytes]` holds a page for each row of a batch, so
    that the address of a page is all that a kernel needs.
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
    def scale_start(self) -> int:
        """The byte at which the scales begin. The codes begin at 0."""
        return _aligned(self.heads * self.tokens * self.format.row_bytes(self.dim))

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

    def view(self, block: torch.Tensor) -> int2.Quantized:
        """The sections of a block, which share its memory: packed codes `[B, H, P, row bytes]`,
        scales `[B, H, P / S, G]`, and offsets of this shape, or `[B, H, P / S, 0]`."""
        row = self.format.row_bytes(self.dim)
        codes = block[:, : self.heads * self.tokens * row]
        return int2.Quantized(
            codes.unflatten(1, (self.heads, self.tokens, row)),
            self._metadata(block, self.scale_start, self.groups),
            self._metadata(block, self.offset_start, self._offsets),
        )

    def dequantize(self, stored: int2.Quantized) -> torch.Tensor:
        """Rows `[B, H, T, D]`, float32, of sections with packed codes of any number of tokens."""
        codes = int2.unpack(stored.codes, self.format)
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

    def _metadata(self, block: torch.Tensor, start: int, numbers: int) -> torch.Tensor:
        section = block[:, start : start + self._metadata_bytes(numbers)]
        values = section.view(int2.METADATA_TYPES[self.format.metadata])
        rows = self.tokens // self.tokens_per_scale
        by_head: torch.Tensor = values.unflatten(1, (self.heads, rows, numbers))
        return by_head


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
