"""How keys and values are rotated on their way into a 2-bit cache, and back."""

import pytest
import torch
from support.float64 import to_float64

from rotationzoo.artifact.store import Artifact
from rotationzoo.codec.rotated import RotatedCodec


@pytest.mark.parametrize("order", ["together", "one by one"])
@pytest.mark.parametrize("side", ["key", "value"])
def test_rows_are_rotated_in_float32_as_in_float64(made, side, order):
    """However many of them are multiplied together."""
    rotations = Artifact.open(made).rotations
    single, double = RotatedCodec(rotations), RotatedCodec(to_float64(rotations))
    rows = torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(0))
    parts = rows.split(1 if order == "one by one" else 300, dim=2)
    for way in ("rotate", "restore"):
        found = torch.cat([getattr(single, way)(part, 1, side) for part in parts], dim=2)
        exact = getattr(double, way)(rows, 1, side)
        assert (found.dtype, exact.dtype) == (torch.float32, torch.float64)
        most = 64 * torch.finfo(torch.float32).eps * exact.abs().max()  # a sum of 64 terms
        assert (found - exact).abs().max() <= most
