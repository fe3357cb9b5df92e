"""The arm `kivi`: keys quantized per channel over groups of tokens, values per token (KIVI, arXiv
2402.02750)."""

import math
from dataclasses import dataclass, replace

import torch

from rotationzoo.codec import int2
from rotationzoo.simulation.arm import Arm

FORMAT = int2.Format(
    "row", interpolated=False, metadata="float16", offset="minimum", packing="consecutive"
)
"""Codes are `(x - minimum) / scale`, rounded, with scale and minimum in float16 and no clip."""


@dataclass(frozen=True)
class KiviArm(Arm):
    """A cache as in KIVI, in which a key channel has one scale and one minimum per group of tokens.

    Simulated, with the windows of the other arms:

    * Keys: `tokens` successive tokens of a channel share a scale. Groups are counted from the end
      of the sink. A group is quantized once all of its tokens have left the recent window, so that
      up to `tokens - 1` more tokens stay exact.
    * Values, and latents: `channels` channels of one token share a scale (or their greatest common
      divisor with the head dimension). They stay exact as long as their keys do. KIVI itself
      quantizes a value as soon as it leaves the window, so this is slightly in its favour.
    * The sink stays exact, which KIVI does not do.

    Of the other arms' format only the bits matter, and the clip ratios of the rotations do not.
    Without a rotation (`identity`) this is KIVI; with one, keys are centered and rotated head by
    head first.
    """

    tokens: int = 32
    channels: int = 32

    @property
    def token_group(self) -> int:
        return self.tokens

    def stored_bits(self, side: str, dim: int, format: int2.Format) -> float:
        group = self.tokens if side == "key" else self._value_group(dim)
        return int2.bits_per_element(group, format=replace(FORMAT, bits=format.bits))

    def store(self, rows: torch.Tensor, layer: int, side: str, format: int2.Format) -> torch.Tensor:
        """Rotated rows `[B, H, T, D]` as a reader gets them back. The last `T % tokens` rows, an
        incomplete group, are returned as they are."""
        complete = rows.shape[2] // self.tokens * self.tokens
        if not complete:
            return rows
        stored, rest = rows[:, :, :complete], rows[:, :, complete:]
        return torch.cat([super().store(stored, layer, side, format), rest], dim=2)

    def row_range(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor | None:
        """The ranges of values. Keys have none, because they are rounded over tokens."""
        return None if side == "key" else super().row_range(rows, layer, side)

    def quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> int2.Quantized:
        """Choose the codes of complete groups. A key channel has a scale per group of tokens: those
        of keys are `[B, H, T / tokens, D]`."""
        stored = self.stored_format(layer, side, format)
        if side != "key":
            return int2.quantize(rows, 1.0, self._value_group(rows.shape[-1]), stored)
        # One row per channel, cut into groups of tokens.
        return _swap(int2.quantize(rows.mT, 1.0, self.tokens, stored))

    def stored_format(self, layer: int, side: str, format: int2.Format) -> int2.Format:
        """KIVI's own format, whatever the other arms store, with as many bits."""
        return replace(FORMAT, bits=format.bits)

    def dequantize(self, quantized: int2.Quantized, side: str, format: int2.Format) -> torch.Tensor:
        if side != "key":
            return int2.dequantize(quantized, FORMAT)
        return int2.dequantize(_swap(quantized), FORMAT).mT

    def _value_group(self, dim: int) -> int:
        return math.gcd(self.channels, dim)


def _swap(quantized: int2.Quantized) -> int2.Quantized:
    """Swap tokens and channels."""
    return int2.Quantized(quantized.codes.mT, quantized.scale.mT, quantized.offset.mT)
