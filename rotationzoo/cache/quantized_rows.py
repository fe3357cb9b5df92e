"""The rows that a simulation has quantized already, so that decoding quantizes each only once."""

import torch

from rotationzoo.cache.protocol import CacheArm
from rotationzoo.codec import int2


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
            return self.arm.fake_quantize(rows, layer, side, self.format)
        known, restored = self._kept.get((layer, side), (rows[:, :, :0], rows[:, :, :0]))
        count = known.shape[2]
        # Another prompt may have begun.
        if not torch.equal(known, rows[:, :, :count]):
            count = 0
        if count < rows.shape[2]:
            new = self.arm.fake_quantize(rows[:, :, count:], layer, side, self.format)
            restored = torch.cat([restored[:, :, :count], new], dim=2)
        self._kept[layer, side] = rows, restored
        return restored
