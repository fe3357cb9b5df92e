"""What keys and values are after a 2-bit cache: rotation, clip, codec and back, and their means."""

import pytest
import torch
from support.float64 import assert_same_codes, to_float64

from rotationzoo.artifact.store import Artifact
from rotationzoo.codec import int2
from rotationzoo.codec.formats import FORMATS
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.geometry import Layer

LAYER = Layer(0, 0, 4, 2, 64, 64)


@pytest.mark.parametrize("order", ["together", "one by one"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("side", ["key", "value"])
def test_rows_are_rotated_in_float32_as_in_float64(made, side, format, order):
    """However many of them are multiplied together."""
    rotations = Artifact.open(made).rotations
    arms = RotatedCodec(rotations, 32), RotatedCodec(to_float64(rotations), 32)
    rows = torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(0))
    parts = rows.split(1 if order == "one by one" else 300, dim=2)
    rotated = torch.cat([arms[0].rotate(part, 1, side) for part in parts], dim=2)
    exact = arms[1].rotate(rows, 1, side)
    assert (rotated.dtype, exact.dtype) == (torch.float32, torch.float64)
    stored, expected = (
        arm.quantize(each, 1, side, format)
        for arm, each in zip(arms, (rotated, exact), strict=True)
    )
    assert_same_codes(stored, expected, exact, format)
    restored, wanted = (arm.restore(int2.dequantize(expected, format), 1, side) for arm in arms)
    eps = torch.finfo(torch.float32).eps
    assert (restored - wanted).abs().max() <= 64 * eps * wanted.abs().max()
    expected.codes[..., 0, 3] ^= 1
    with pytest.raises(AssertionError):
        assert_same_codes(stored, expected, exact, format)
