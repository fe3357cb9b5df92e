"""What a simulation tells about the layers that it runs: functions that each receive one of the
figures that it compares with the exact cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Pair = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`(layer, simulated, exact)`: both are computed from the same input."""


def _ignore(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Observers:
    """Receivers of what a simulation compares, layer by layer. One that is left out ignores it."""

    output: Pair = _ignore
    """The attention block's outputs `[B, T, hidden]`, after the output projection."""
    heads: Pair = _ignore
    """The attention outputs `[B, T, H, G * D]` before it: of the G query heads that read each of H
    KV heads."""
    kl: Pair = _ignore
    """`(layer, divergence, positions)`: KL divergence `[B, H, Q]` of the attention of the queries
    at these positions `[Q]`, averaged over the query heads that read each of H KV heads."""
    row_range: Callable[[int, str, torch.Tensor], None] = _ignore
    """`(layer, side, ranges)`: the ranges `[B, H, T]` of the rows past the sink that the layer
    reads, as `CacheArm.row_range` has them. Only for sides that have them."""
