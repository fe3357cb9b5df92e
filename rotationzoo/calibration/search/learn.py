"""Learning a rotation through the exact codec, with a straight-through gradient for the
rounding."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from rotationzoo.codec import int2


def straight_through(
    rows: torch.Tensor, clip: torch.Tensor, group_size: int | None, form: int2.Format
) -> torch.Tensor:
    """`int2.round_trip`, bit by bit, with the gradient of its formula in which rounding counts as
    nothing.

    Scale and threshold are part of that gradient: a smaller range is what makes a rotation better.
    """
    groups = rows.unflatten(-1, (-1, group_size or rows.shape[-1]))
    return _Rounded.apply(groups, int2.group_threshold(groups, clip, form), form).flatten(-2)


class _Rounded(torch.autograd.Function):
    """Clamped groups through the codec: `code * (high - low) / 3 + low`, where a code's derivative
    is that of its exact value.

    The derivative along an entry is then 1, and that along the range the rounding error in units of
    the range. Written out, since this is most of the time that learning takes.
    """

    @staticmethod
    def forward(
        ctx: Any, groups: torch.Tensor, threshold: torch.Tensor, form: int2.Format
    ) -> torch.Tensor:
        clamped = torch.clamp(groups, -threshold, threshold)
        quantized = int2.encode(clamped, form)
        exact = int2.dequantize(quantized, form).view_as(groups)
        (low, lowest), (high, highest) = (
            clamped.min(-1, keepdim=True),
            clamped.max(-1, keepdim=True),
        )
        rounding = (exact - clamped) / (high - low).clamp(min=int2.SMALLEST_RANGE)
        ctx.save_for_backward(groups, threshold, rounding, low, lowest, high, highest)
        return exact

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        groups, threshold, rounding, low, lowest, high, highest = ctx.saved_tensors
        (gradient,) = gradients
        by_range = (gradient * rounding).sum(-1, keepdim=True)
        # An entry beyond the threshold, and a range that ends there, move with the threshold.
        sign = (groups > threshold).float() - (groups < -threshold).float()
        above, below = high == threshold, low == -threshold
        by_threshold = (gradient * sign).sum(-1, keepdim=True) + by_range * (
            above.float() + below.float()
        )
        by_entry = gradient * (sign == 0)
        by_entry.scatter_add_(-1, highest, by_range.masked_fill(above, 0))
        by_entry.scatter_add_(-1, lowest, -by_range.masked_fill(below, 0))
        return by_entry, by_threshold.sum_to_size(threshold.shape), None


TOKENS = 4096  # rows of a step of learning
_LEAST = 1e-9  # of the metric's trace, so that a metric of low rank has a root


def learn(
    rows: torch.Tensor,
    metric: torch.Tensor,
    start: torch.Tensor,
    codec: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
    rate: float,
    tokens: int = TOKENS,
    seed: int = 0,
    deadline: float = math.inf,
) -> tuple[torch.Tensor, list[list[float]]]:
    """Rotations `[S, H, D, D]` float32 that lower `E[e M e^T]`, e the error of a stored row, and
    the S losses by step.

    `rows` are `[H, N, D]`, `metric` M `[H, D, D]` is how errors count, `codec` maps rotated rows
    `[S, H, T, D]` to what comes back. Every step multiplies by the Cayley transform `(I - A/2)^-1
    (I + A/2)` of a skew-symmetric A: Adam's step, with a cosine rate, on `tokens` random rows.
    Losses are relative to the rows' own energy. `deadline` (`time.monotonic()`) ends it early,
    before the first step if it has passed. Re-orthogonalised in float64 by the polar decomposition.

    A fixed metric is a far smoother target than the softmax of some sampled queries: learning that
    fits them lowers their divergence by half and raises that of others.
    """
    metric = metric.double().cpu()
    trace = metric.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    eye = torch.eye(metric.shape[-1], dtype=torch.float64)
    root = torch.linalg.cholesky(metric / trace + _LEAST * eye).float().to(rows.device)
    energy = (rows @ root).square().sum(-1).mean(-1)
    matrix, unit = start.clone().requires_grad_(), eye.float().to(rows.device)
    turn = torch.zeros_like(start)
    adam = torch.optim.Adam([turn], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    draw = torch.Generator().manual_seed(seed)
    curve: list[torch.Tensor] = []
    for _ in range(steps):
        if time.monotonic() > deadline:
            break
        rotated = (
            rows[:, torch.randint(rows.shape[1], (tokens,), generator=draw).to(rows.device)]
            @ matrix
        )
        loss = ((codec(rotated) - rotated) @ (matrix.mT @ root)).square().sum(-1).mean(-1) / energy
        (gradient,) = torch.autograd.grad(loss.sum(), matrix)
        with torch.no_grad():
            along = matrix.mT @ gradient
            turn.zero_().grad = along - along.mT
            adam.step()
            matrix.copy_(matrix @ torch.linalg.solve(unit - turn / 2, unit + turn / 2))
        schedule.step()
        curve.append(loss.detach().sum(-1))
    with torch.no_grad():
        left, _, right = torch.linalg.svd(matrix.double())
        return (left @ right).float(), [losses.tolist() for losses in curve]
