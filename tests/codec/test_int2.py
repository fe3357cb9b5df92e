"""The codec's definition: what it promises of every row, what it refuses, and where it clips."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.codec import RATIOS, largest, many, restore, rows, shapes, some

from rotationzoo.codec import int2
from rotationzoo.codec.int2 import clip_threshold
from rotationzoo.errors import RotationZooError

FORMATS = pytest.mark.parametrize("format", int2.FORMATS.values(), ids=int2.FORMATS)
PACKINGS = pytest.mark.parametrize("packing", ["strided", "consecutive"])
STRIDED, CONSECUTIVE = int2.SGLANG, replace(int2.SGLANG, packing="consecutive")


def ulp(numbers: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.spacing(numbers.numpy()))


def ordinary(x: torch.Tensor, group: int) -> bool:
    """Every group uses codes 0 and 3, and float16 metadata can hold its range."""
    groups = x.unflatten(-1, (-1, group))
    width = groups.amax(-1) - groups.amin(-1)
    return bool((width > 0.02 * groups.abs().amax(-1)).all() and (width > 1e-2).all())


def clipped(x: torch.Tensor, clip: float, format: int2.Format) -> torch.Tensor:
    """Rows as they are after the clip."""
    limit = clip_threshold(x, clip, format.interpolated).unsqueeze(-1)
    return x.clamp(-limit, limit)


@PACKINGS
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 33)),
    seed=st.integers(0, 99),
)
@many
def test_every_shape_survives_packing_and_unpacking(packing, shape, seed):
    *before, words = shape
    dim = 4 * words
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(4, (*before, dim), dtype=torch.uint8, generator=generator)
    format = replace(int2.SGLANG, packing=packing)
    packed = int2.pack(codes, format)
    assert packed.shape == (*before, words)
    assert torch.equal(int2.unpack(packed, format), codes)


@FORMATS
@given(
    shape=shapes(), seed=st.integers(0, 999), exponent=st.integers(-6, 9), zero=st.integers(-24, 24)
)
@many
def test_codes_of_grid_values_survive(format, shape, seed, exponent, zero):
    dim, group = shape
    codes = torch.randint(4, (dim // group, group), generator=torch.Generator().manual_seed(seed))
    codes[:, 0], codes[:, -1] = 0, 3
    values = ((codes - zero) * 2.0**exponent).flatten()
    quantized = int2.quantize(values, 1.0, group, format)
    assert torch.equal(quantized.codes.long(), codes.flatten())
    assert torch.equal(int2.dequantize(quantized, format), values)


@FORMATS
@given(case=rows(largest=30000.0), clip=RATIOS)
@some
def test_the_error_inside_the_clip_is_half_a_step(format, case, clip):
    x, group = case
    assume(ordinary(clipped(x, clip, format), group))
    assert_half_a_step(x, clip, group, format)


def assert_half_a_step(x: torch.Tensor, clip: float, group: int, format: int2.Format) -> None:
    """Half a step, and the rounding of the metadata; codes reach both ends within it."""
    quantized = int2.quantize(x, clip, group, format)
    steps = quantized.scale.float()
    # Of a stored minimum or zero, and of a scale times the largest code: 4 ulps, or 4 of float16.
    rounding = 4 * ulp(largest(x)) if format.metadata == "float32" else 2.0**-9 * largest(x)
    codes = quantized.codes.unflatten(-1, (-1, group))
    missed = 0.5 + rounding / steps
    assert (codes.amin(-1) <= missed).all()
    assert (codes.amax(-1) >= 3 - missed).all()
    error = (int2.dequantize(quantized, format) - clipped(x, clip, format)).abs()
    assert (error <= steps.repeat_interleave(group, -1) / 2 + rounding).all()


@FORMATS
@pytest.mark.parametrize(("far", "near"), [(-21927.0, -17514.0), (24008.0, 20000.0), (-1.0, -0.8)])
def test_a_row_far_from_zero_with_a_small_range(format, far, near):
    """A float16 minimum near -21,927 is off by 7."""
    x = torch.full((1, 64), far)
    x[0, 50] = near
    assert_half_a_step(x, 1.0, 64, format)


def test_a_ratio_for_each_head_and_clip_off():
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0))  # [B, H, T, D]
    ratios = torch.tensor([0.96, 0.5, 1.0])
    together = restore(x, ratios[:, None], 32)
    for head, ratio in enumerate(ratios.tolist()):
        assert torch.equal(together[:, head], restore(x[:, head], ratio, 32))
    groups = x[:, 2].unflatten(-1, (2, 32))
    no_clip = int2.quantize(x[:, 2], 1.0, 32)
    assert torch.equal(no_clip.scale, (groups.amax(-1) - groups.amin(-1)) / 3)


@FORMATS
def test_edge_rows_stay_finite(format):
    x = torch.zeros(6, 32)
    x[1], x[2, 5], x[3], x[4] = 7.25, -3.0, 1e-41, 1e18
    x[5] = torch.linspace(-1e18, 1e18, 32)
    for clip in (1.0, 0.9):
        back = restore(x, clip, 16, format)
        assert back.isfinite().all()
        assert torch.allclose(back[1], x[1])
        assert (back[0] == 0).all()
        assert back[3].abs().max() < 1e-37


ONES, PLACE = torch.ones(3, 16), (torch.tensor(1), torch.tensor(4))
OUTSIDE = [torch.tensor(number) for number in (math.nan, math.inf, -math.inf, 1.01e18)]
REFUSED = [
    *(((ONES.index_put(PLACE, number),), "not finite or exceeds") for number in OUTSIDE),
    *(((torch.ones(d), 1.0, group), "do not divide") for d, group in ((6, 6), (16, 5), (18, 9))),
    *(((ONES, ratio), "clip ratio") for ratio in (0.0, -0.5, 1.5, math.nan)),
    ((ONES, 1.0, None, int2.SIMULATED["segments"]), "codes of transform coding, and no nearest"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED)
def test_rows_shapes_and_ratios_that_have_no_codes_are_refused(arguments, says):
    with pytest.raises(RotationZooError, match=says):
        int2.quantize(*arguments)


def test_the_worked_row_of_the_documentation():
    x = torch.tensor([0.9, -0.3, 0.1, -1.2, 4.0, 0.6, -0.7, 0.2])
    quantized = int2.quantize(x, 0.8)
    assert clip_threshold(x, 0.8).item() == pytest.approx(1.2)
    assert (quantized.scale.item(), quantized.offset.item()) == pytest.approx((0.8, 1.5))
    assert quantized.codes.tolist() == [3, 1, 2, 0, 3, 2, 1, 2]
    assert int2.pack(quantized.codes, STRIDED).tolist() == [0x7B, 0xA1]
    assert int2.pack(quantized.codes, CONSECUTIVE).tolist() == [0x27, 0x9B]
    assert int2.dequantize(quantized).tolist() == pytest.approx(
        [1.2, -0.4, 0.4, -1.2, 1.2, 0.4, -0.4, 0.4]
    )


# ---- where a row's threshold is among its magnitudes


@given(case=rows(), clip=RATIOS)
@many
def test_the_threshold_is_an_entry_of_the_sorted_row(case, clip):
    x, _ = case
    entry = min(math.floor(clip * x.shape[-1] + 1e-6), x.shape[-1] - 1)
    assert torch.equal(clip_threshold(x, clip), x.abs().sort(-1).values[:, entry])
    quantile = torch.quantile(x.abs(), clip, dim=-1)
    interpolated = clip_threshold(x, clip, interpolated=True)
    position = x.shape[-1] * 2.0**-24  # torch has it in float32
    assert ((interpolated - quantile).abs() <= 4 * position * largest(x)[:, 0]).all()
