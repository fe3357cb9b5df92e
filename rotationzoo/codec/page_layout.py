"""Pages of packed rows: codes, scales and offsets of some tokens in one piece of memory."""

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
    """How the keys or values of successive tokens lie in a page: one row of a batch, all KV heads.

    Codes, scales and offsets follow each other, so that a kernel reads aligned words: each section
    starts at a multiple of 16 bytes. A block uint8 `[B, bytes]` holds a page for each row of a
    batch, so that the address of a page is all that a kernel needs.
    """

    heads: int
    dim: int
    groups: int
    """Scales of one head (G), each of a group of channels."""
    tokens: int
    """Tokens of a page (P)."""
    format: Format

    @property
    def row_bytes(self) -> list[int]:
        """Bytes of a row of each head, with its scales and offsets."""
        return [sum(width * type.itemsize for width, type in self._shapes)] * self.heads

    @cached_property
    def starts(self) -> list[int]:
        """The bytes at which the three sections begin, and the bytes of a page."""
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

    def view(self, block: torch.Tensor) -> int2.Quantized:
        """The sections `[B, H, P, ...]` of a block, which share its memory, with packed codes."""
        sections = []
        for start, (width, type) in zip(self.starts, self._shapes, strict=False):
            size = self.heads * self.tokens * width * type.itemsize
            section = block[:, start : start + size].view(type)
            sections.append(section.unflatten(1, (self.heads, self.tokens, width)))
        return int2.Quantized(*sections)

    def dequantize(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows `[B, H, T, D]`, float32, of the three sections of any number of tokens."""
        packed, scale, offset = stored
        codes = int2.unpack(packed, self.format)
        return int2.dequantize(int2.Quantized(codes, scale, offset), self.format)

    @property
    def _shapes(self) -> list[tuple[int, torch.dtype]]:
        """Numbers of a row, and their type, of each section."""
        metadata = int2.METADATA_TYPES[self.format.metadata]
        code_bytes = self.dim // 4
        return [(code_bytes, torch.uint8), (self.groups, metadata), (self.groups, metadata)]
