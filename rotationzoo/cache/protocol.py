"""The interface of an arm: what a simulated cache stores, and what it takes to store it."""

from typing import Protocol

import torch

from rotationzoo.codec import int2


class CacheArm(Protocol):
    """One way to store keys and values, under a name that is unique in a comparison."""

    @property
    def name(self) -> str:
        """The arm's name in tables and reports."""
        ...

    @property
    def token_group(self) -> int:
        """How many tokens are quantized together, as in `Cache`."""
        ...

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` of a layer as the exact windows store them."""
        ...

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` of a layer as a reader gets them back once they are
        quantized, in their type.

        The first row is the first token after the sink. Rows of an incomplete group come back as
        they are.
        """
        ...

    def row_range(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor | None:
        """`(max - min) / rms` `[B, H, T]` of keys or values `[B, H, T, D]` of a layer, in the
        coordinates in which they are rounded; None where rows are not rounded one by one."""
        ...

    def stored_bits(self, side: str, dim: int, format: int2.Format) -> float:
        """Bits per quantized element of a side with `dim` channels, including its share of scales
        and offsets."""
        ...
