"""The codec with a gradient: its values are the codec's, its gradient that of the definition."""

import pytest
import torch

from rotationzoo.calibration.search.straight_through import straight_through
from rotationzoo.codec import int2


@pytest.mark.parametrize("format", int2.FORMATS)
@pytest.mark.parametrize("group", [None, 8])
def test_the_straight_through_codec_is_the_codec(format, group):
    rows = torch.randn(2, 3, 16, 32, generator=torch.Generator().manual_seed(0)) * 3
    clip = torch.tensor([[0.9], [0.7], [1.0]], dtype=torch.float64)
    rows.requires_grad_()
    restored = straight_through(rows, clip, group, int2.FORMATS[format])
    expected = int2.round_trip(rows.detach(), clip, group, int2.FORMATS[format])
    assert torch.equal(restored, expected)
    # Rows twice as large come back twice as large, so the derivative along the rows is what comes
    # back.
    weights = torch.randn(restored.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((restored * weights).sum(), rows)
    # The gradient does not know that metadata is rounded to float16.
    allowed = 1e-6 if format == "sglang" else 1e-3
    scale = (weights * restored).abs().sum()
    assert abs((gradient * rows - weights * restored).sum()) < allowed * scale


def by_definition(
    rows: torch.Tensor, clip: torch.Tensor, group: int | None, format: int2.Format
) -> torch.Tensor:
    """The codec's formula, in which a code is its exact value as far as the gradient sees."""
    groups = rows.unflatten(-1, (-1, group or rows.shape[-1]))
    if format.clip_scope == "row":
        threshold = int2.clip_threshold(rows, clip, format.interpolated)[..., None, None]
    else:
        threshold = int2.clip_threshold(groups, clip.unsqueeze(-1), format.interpolated)[..., None]
    clamped = torch.maximum(torch.minimum(groups, threshold), -threshold)
    low, high = clamped.amin(-1, keepdim=True), clamped.amax(-1, keepdim=True)
    scale = (high - low) / 3
    steps = (clamped - low) / scale
    codes = steps + ((steps + 0.5).trunc().clamp(0, 3) - steps).detach()
    return (codes * scale + low).flatten(-2)


@pytest.mark.parametrize("format", int2.FORMATS)
@pytest.mark.parametrize("group", [None, 8])
def test_the_gradient_is_that_of_the_definition(format, group):
    rows = torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(0)) * 3
    # Few below, so that a range ends at the threshold on one side only.
    rows[0, 0, 0, :30] = rows[0, 0, 0, :30].abs() + 4
    clip = torch.tensor([[0.9], [0.7], [1.0]], dtype=torch.float64)
    weights = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    rows.requires_grad_()

    def gradient_of(codec) -> torch.Tensor:
        restored = codec(rows, clip, group, int2.FORMATS[format])
        return torch.autograd.grad((restored * weights).sum(), rows)[0]

    gradient, expected = gradient_of(straight_through), gradient_of(by_definition)
    error = (gradient - expected).norm() / expected.norm()
    # Measured 1.2e-7 and 1.2e-2: metadata in float16 moves some codes.
    assert error < (1e-6 if format == "sglang" else 3e-2)
