"""Pages of packed rows: the codes, scales and offsets of some tokens in one piece of memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from rotationzoo.codec import int2
from rotationzoo.codec.formats import Format

_ALIGNMENT = 16  # bytes: what a GPU loads at once


@dataclass(frozen=True)
class PageLayout:
    """How the keys or values of successive tokens lie in a page, for one row of a batch and all KV
    heads. A block uint8 `[B, bytes]` holds a page for each row of a batch.

    The sections of codes, scales and offsets follow each other. Each starts at a multiple of 16
    bytes, so that a kernel reads aligned words.
    """

    heads: int
    dim: int
    groups: int
    """Groups of channels that share a scale, of one head (G)."""
    tokens: int
    """Tokens of a page (P)."""
    format: Format

    @property
    def row_bytes(self) -> list[int]:
        """Bytes of a row of each head, with its scales and offsets."""
        return [sum(width * type.itemsize for width, type in self._shapes)] * self.heads

    @cached_property
    def starts(self) -> list[int]:
        """The first byte of each of the three sections, and the bytes of a page."""
        rows = self.heads * self.tokens
        sizes = (rows * width * type.itemsize for width, type in self._shapes)
        return [*accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)]

    @property
    def bytes(self) -> int:
        return self.starts[-1]

    def empty(self, batch: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A block of zeros, uint8 `[batch, bytes]`."""
        return torch.zeros(batch, self.bytes, dtype=torch.uint8, device=device)

    def view(self, block: torch.Tensor) -> int2.Quantized:
        """The sections `[B, H, P, ...]` of a block with packed codes, which share its memory."""
        sections = []
        for start, (width, type) in zip(self.starts, self._shapes, strict=False):
            size = self.heads * self.tokens * width * type.itemsize
            section = block[:, start : start + size].view(type)
            sections.append(section.unflatten(1, (self.heads, self.tokens, width)))
        return int2.Quantized(*sections)

    def dequantize(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows `[B, H, T, D]`, float32, from the sections of any number of tokens."""
        packed, scale, offset = stored
        codes = int2.unpack(packed, self.format)
        return int2.dequantize(int2.Quantized(codes, scale, offset), self.format)

    @property
    def _shapes(self) -> list[tuple[int, torch.dtype]]:
        """How many numbers a row has in each section, and their type."""
        metadata = self.groups, int2.METADATA_TYPES[self.format.metadata]
        return [(self.dim // 4, torch.uint8), metadata, metadata]
