"""The clip rules: where a row's threshold is among its magnitudes."""

import math

import pytest
import torch
from hypothesis import given
from support.codec import RATIOS, largest, many, rows

from rotationzoo.codec import int2
from rotationzoo.codec.clip import bisected_threshold, clip_threshold
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.errors import RotationZooError


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


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.5, math.nan])
def test_ratios_that_clip_everything_or_nothing_at_all_are_refused(ratio):
    with pytest.raises(RotationZooError, match="clip ratio"):
        int2.quantize(torch.ones(16), ratio)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("ratio", [0.9, 0.96, 1.0])
def test_a_bisected_threshold_step_by_step(dim, ratio):
    """The kernel's own loop, a row at a time; at a ratio of 1 nothing is clamped."""
    rows = torch.randn(20, dim, generator=torch.Generator().manual_seed(0)) ** 3
    entry = min(int(ratio * dim + 1e-6), dim - 1)
    for row, threshold in zip(rows.abs(), bisected_threshold(rows, ratio), strict=True):
        low, high = torch.tensor(0.0), row.max()
        for _ in range(int(math.log2(dim))):
            middle = (low + high) * 0.5
            if (row > middle).sum() > dim - entry:
                low = middle
            else:
                high = middle
        assert threshold == (row.max() if ratio == 1 else high)


def test_a_format_that_bisects_clamps_elsewhere_than_one_that_sorts():
    rows = torch.randn(100, 128, generator=torch.Generator().manual_seed(0))
    sorted_codes, bisected_codes = (
        int2.quantize(rows, 0.96, format=SIMULATED[name]).codes
        for name in ("sglang", "sglang-bisected")
    )
    assert 0 < (sorted_codes != bisected_codes).double().mean() < 0.1
    short = rows[:, :32]
    assert torch.equal(bisected_threshold(short, 0.9), clip_threshold(short, 0.9)), (
        "rows of fewer than 64 channels are sorted"
    )
