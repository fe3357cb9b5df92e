"""The rows that a simulation has quantized already, so that decoding quantizes each only once."""

import torch

from rotationzoo.codec import int2
from rotationzoo.simulation.arm import CacheArm

TOKENS = 16384
"""Tokens that are quantized at a time. The codec takes about ten times the bytes of its rows, most
of them to sort magnitudes: 5 GB for 131,072 tokens of 8 heads of 128."""


class QuantizedRows:
    """Keys and values of every layer as an arm returns them.

    A step of decoding reads the rows of the step before and new ones. Where an arm quantizes each
    row by itself, only the new ones are left to do. That matters where codes are chosen one channel
    after the other, which takes long however few rows there are.
    """

    def __init__(self, arm: CacheArm, format: int2.Format):
        self.arm, self.format = arm, format
        self._kept: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def quantize(
        self, rows: torch.Tensor, layer: int, side: str, decoding: bool = False
    ) -> torch.Tensor:
        """Rows `[B, H, T, D]` as the arm returns them. With `decoding` they are kept for the next
        step, and those that begin with the kept ones are not quantized again."""
        if not decoding or self.arm.token_group > 1:
            self._kept.pop((layer, side), None)
            return self._quantize(rows, layer, side)
        known, restored = self._kept.get((layer, side), (rows[:, :, :0], rows[:, :, :0]))
        count = known.shape[2]
        # Another prompt may have begun.
        if not torch.equal(known, rows[:, :, :count]):
            count = 0
        if count < rows.shape[2]:
            new = self._quantize(rows[:, :, count:], layer, side)
            restored = torch.cat([restored[:, :, :count], new], dim=2)
        self._kept[layer, side] = rows, restored
        return restored

    def ranges(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor | None:
        """The ranges `[B, H, T]` of rows `[B, H, T, D]` before the arm rounds them; None where it
        has none to tell."""
        parts = []
        for part in rows.split(TOKENS, dim=2):
            ranges = self.arm.row_range(part, layer, side)
            if ranges is None:
                return None
            parts.append(ranges)
        return torch.cat(parts, dim=2)

    def _quantize(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """The same, of any number of rows. Whole groups of tokens are quantized on their own."""
        size = TOKENS // self.arm.token_group * self.arm.token_group
        parts = rows.split(size, dim=2)
        quantized = [self.arm.fake_quantize(part, layer, side, self.format) for part in parts]
        return torch.cat(quantized, dim=2)
