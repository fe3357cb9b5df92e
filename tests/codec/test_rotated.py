"""What keys and values are after a 2-bit cache: rotation, clip, codec and back, and their means."""

from dataclasses import replace

import pytest
import torch
from support.float64 import assert_same_codes, to_float64

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.store import Artifact
from rotationzoo.codec import int2
from rotationzoo.codec.formats import FORMATS
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.geometry import Layer
from rotationzoo.recipe.loading import PRESETS

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


@pytest.mark.parametrize(("bits", "ratio"), [(2, 0.92), (3, 0.96), (4, 0.98)])
def test_further_bits_clip_a_smaller_share_of_a_row(bits, ratio):
    rotations = fit(None, PRESETS["identity"].model_copy(update={"value_clip": 0.92}), [LAYER])
    rows = torch.randn(1, LAYER.kv_heads, 8, LAYER.value_dim)
    stored = replace(FORMATS["sglang"], bits=bits)
    quantized = RotatedCodec(rotations).quantize(rows, 0, "value", stored)
    expected = int2.quantize(rows, ratio, format=stored)
    assert torch.equal(quantized.codes, expected.codes)
    assert torch.equal(quantized.scale, expected.scale)
