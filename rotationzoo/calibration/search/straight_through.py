"""The 2-bit codec with a gradient, so that rotations can be learned through it."""

from collections.abc import Callable
from typing import Any

import torch

from rotationzoo.codec import int2


def straight_through(
    rows: torch.Tensor, clip: torch.Tensor, group_size: int | None, format: int2.Format
) -> torch.Tensor:
    """`int2.round_trip` of rows `[..., D]`, bit for bit, with a gradient that ignores rounding.

    The straight-through estimator (Bengio et al. 2013, arXiv:1308.3432) treats rounding as adding a
    constant. The scale and the clip threshold remain part of the gradient, because a smaller range
    is what makes a rotation better.
    """
    groups = torch.unflatten(rows, -1, (-1, group_size or rows.shape[-1]))
    threshold = int2.group_threshold(groups, clip, format)
    return _round_trip_groups(groups, threshold, format).flatten(-2)


class _RoundTrip(torch.autograd.Function):
    """Groups `[..., D / group, group]` through the codec, given their clip threshold.

    For one group with entries x and threshold t:

        c = clamp(x, -t, t)     low = min c     high = max c     r = high - low
        y = low + r k / 3       with the codes k = round(3 (c - low) / r)

    Let e = (y - c) / r, the rounding error in units of the range, so that y = c + r e. The
    straight-through estimator holds e constant. For the gradient g = dL/dy this gives

        dL/dc = g               dL/dr = G = sum(g e)

    and, since r = high - low, the entry at the maximum receives +G and the one at the minimum -G.
    A clamped entry is +t or -t and passes its gradient on to the threshold:

        dL/dx = g               where |x| <= t, else 0
        dL/dt = sum(g sign(x))  over |x| > t
                + G if high = t, + G if low = -t  (instead of to the entries at either end)

    This is written out and not left to autograd because learning spends most of its time here.
    """

    @staticmethod
    def forward(
        ctx: Any, groups: torch.Tensor, threshold: torch.Tensor, format: int2.Format
    ) -> torch.Tensor:
        clamped = torch.clamp(groups, -threshold, threshold)
        low, lowest = clamped.min(-1, keepdim=True)
        high, highest = clamped.max(-1, keepdim=True)
        restored = _restore(clamped, low, high, format)
        rounding_error = (restored - clamped).div_((high - low).clamp(min=int2.SMALLEST_RANGE))
        clamped_sign = (groups - clamped).sign_()
        ctx.save_for_backward(
            clamped_sign, rounding_error, lowest, highest, low == -threshold, high == threshold
        )
        ctx.threshold_shape = threshold.shape
        return restored

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        clamped_sign, rounding_error, lowest, highest, low_clamped, high_clamped = ctx.saved_tensors
        (gradient,) = gradients
        by_range = (gradient * rounding_error).sum(-1, keepdim=True)
        clamped_ends = high_clamped.float() + low_clamped.float()
        by_sign = gradient * clamped_sign
        by_threshold = by_sign.sum(-1, keepdim=True) + by_range * clamped_ends
        # 0 where the sign is not: g - g s s.
        by_entry = torch.addcmul(gradient, by_sign, clamped_sign, value=-1)
        by_entry.scatter_add_(-1, highest, by_range.masked_fill(high_clamped, 0))
        by_entry.scatter_add_(-1, lowest, -by_range.masked_fill(low_clamped, 0))
        # One threshold may serve all groups of a row, so its gradients are summed.
        return by_entry, by_threshold.sum_to_size(ctx.threshold_shape), None


def _restore(
    clamped: torch.Tensor, low: torch.Tensor, high: torch.Tensor, format: int2.Format
) -> torch.Tensor:
    """`int2.dequantize(int2.encode(...))` of clamped groups with these minima and maxima: the same
    operations on the same numbers, but in place, and with codes that stay float32."""
    scale, offset = int2.metadata(low, high, format)
    if format.offset == "zero":
        steps = (clamped / scale).add_(offset)
    else:
        steps = (clamped - offset).div_(scale)
    codes = steps.add_(0.5).trunc_().clamp_(0, 3)
    scale, offset = (int2.store_metadata(part, format).float() for part in (scale, offset))
    if format.offset == "zero":
        return codes.sub_(offset).mul_(scale)
    return codes.mul_(scale).add_(offset)


# `apply` is untyped.
_round_trip_groups: Callable[[torch.Tensor, torch.Tensor, int2.Format], torch.Tensor] = (
    _RoundTrip.apply
)
