"""Pages of packed rows: codes, scales and offsets of some tokens in one piece of memory."""

from dataclasses import dataclass

import torch

from rotationzoo.codec import int2
from rotationzoo.codec.formats import Format

_ALIGNMENT = 16  # bytes: what a GPU loads at once


@dataclass(frozen=True)
class PageLayout:
    """How the keys or values of successive tokens lie in a page: one row of a batch, all KV heads.

    Three sections follow each other, and each starts at a multiple of 16 bytes: codes uint8
    `[H, P, D / 4]`, scales `[H, P / S, G]`, and offsets of the same shape, in the format's type. A
    block uint8 `[B, bytes]` holds a page for each row of a batch, so that the address of a page is
    all that a kernel needs.
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
        return _aligned(self.heads * self.tokens * self.dim // 4)

    @property
    def offset_start(self) -> int:
        """The byte at which the offsets begin."""
        return self.scale_start + _aligned(self._metadata_bytes)

    @property
    def bytes(self) -> int:
        """The bytes of a page."""
        return self.offset_start + _aligned(self._metadata_bytes)

    def empty(self, batch: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A block of zeros, uint8 `[batch, bytes]`."""
        return torch.zeros(batch, self.bytes, dtype=torch.uint8, device=device)

    def view(self, block: torch.Tensor) -> int2.Quantized:
        """The sections of a block, which share its memory: packed codes `[B, H, P, D / 4]`, and
        scales and offsets `[B, H, P / S, G]`."""
        codes = block[:, : self.heads * self.tokens * self.dim // 4]
        return int2.Quantized(
            codes.unflatten(1, (self.heads, self.tokens, -1)),
            self._metadata(block, self.scale_start),
            self._metadata(block, self.offset_start),
        )

    def dequantize(self, stored: int2.Quantized) -> torch.Tensor:
        """Rows `[B, H, T, D]`, float32, of sections with packed codes of any number of tokens."""
        codes = int2.unpack(stored.codes, self.format.packing)
        if self.tokens_per_scale == 1:
            return int2.dequantize(int2.Quantized(codes, stored.scale, stored.offset), self.format)
        # A channel takes the place of a row, cut into groups of tokens.
        swapped = int2.Quantized(codes.mT, stored.scale.mT, stored.offset.mT)
        return int2.dequantize(swapped, self.format).mT

    @property
    def _metadata_bytes(self) -> int:
        numbers = self.heads * (self.tokens // self.tokens_per_scale) * self.groups
        return numbers * self.format.metadata_bits // 8

    def _metadata(self, block: torch.Tensor, start: int) -> torch.Tensor:
        section = block[:, start : start + self._metadata_bytes]
        numbers = section.view(int2.METADATA_TYPES[self.format.metadata])
        by_head: torch.Tensor = numbers.unflatten(1, (self.heads, -1, self.groups))
        return by_head


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
