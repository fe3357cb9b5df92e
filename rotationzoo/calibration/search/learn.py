"""Learns rotations by gradient descent on the orthogonal group, through the exact codec."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

TOKENS = 4096  # rows per step of learning
_RIDGE = 1e-9  # times the metric's trace; gives a metric of low rank a Cholesky factor

Codec = Callable[[torch.Tensor], torch.Tensor]
"""Rotated rows `[S, H, T, D]` -> the rows that the cache returns, with a gradient."""


@dataclass(frozen=True)
class LearningSettings:
    """How long and how fast to learn.

    `deadline` (`time.monotonic()`) ends learning early, even before the first step if it has
    passed.
    """

    steps: int
    rate: float
    """Adam's initial learning rate, which falls to 0 along a cosine."""
    seed: int = 0
    tokens: int = TOKENS
    deadline: float = math.inf


def learn_rotations(
    rows: torch.Tensor,
    metric: torch.Tensor,
    start: torch.Tensor,
    codec: Codec,
    settings: LearningSettings,
) -> tuple[torch.Tensor, list[list[float]]]:
    """Learn rotations from S starts at once; return them, `[S, H, D, D]` float32, and the S losses
    by step.

    - `rows` `[H, N, D]`: keys or values that a cache stores; each step draws `settings.tokens` of
      them.
    - `metric` `[H, D, D]`: M, the metric in which errors of rows count.
    - `start` `[S, H, D, D]`: orthogonal matrices R to begin with.
    - `codec`: what a cache returns for rotated rows.
    - `settings`: steps, learning rate, seed and deadline.

    For the error e = (codec(x R) - x R) R^T of a stored row x, the loss is

        L(R) = E[e M e^T] / E[x M x^T]

    Let G = dL/dR, and let a step be R -> R Q(A) with A skew-symmetric. Then dL/dA = R^T G at A = 0,
    of which only the skew-symmetric part R^T G - G^T R matters. Adam maps a skew-symmetric gradient
    to a skew-symmetric step A, because it acts on each entry alone and is odd. The Cayley transform

        Q(A) = (I - A/2)^-1 (I + A/2)

    maps A to an orthogonal matrix that equals exp(A) to second order (Wen and Yin 2013, "A feasible
    method for optimization with orthogonality constraints"; SpinQuant, arXiv:2405.16406, learns its
    rotations this way). A product of many float32 matrices drifts from orthogonality. The result is
    therefore replaced by the nearest orthogonal matrix, the polar factor U V^T of R = U S V^T,
    computed in float64.

    A fixed metric is a far smoother target than the softmax of a few sampled queries. Learning that
    fits sampled queries halves their own divergence but raises that of other queries.
    """
    root = _metric_root(metric).to(rows.device)
    energy = (rows @ root).square().sum(-1).mean(-1)
    matrix = start.clone().requires_grad_()
    skew = torch.zeros_like(start)
    adam = torch.optim.Adam([skew], lr=settings.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, settings.steps)
    generator = torch.Generator().manual_seed(settings.seed)
    curve: list[torch.Tensor] = []
    for _ in range(settings.steps):
        if time.monotonic() > settings.deadline:
            break
        # Draw on the CPU, so that every device learns from the same rows.
        drawn = torch.randint(rows.shape[1], (settings.tokens,), generator=generator)
        loss = _mean_error(rows[:, drawn.to(rows.device)], matrix, root, codec) / energy
        # Each loss depends on its own rotation alone, so the gradient of the sum holds the gradient
        # of each.
        (gradient,) = torch.autograd.grad(loss.sum(), matrix)
        with torch.no_grad():
            along = matrix.mT @ gradient
            # Adam updates `skew` in place; starting from zero leaves only its step.
            skew.zero_().grad = along - along.mT
            adam.step()
            matrix.copy_(matrix @ _cayley(skew))
        schedule.step()
        curve.append(loss.detach().sum(-1))
    with torch.no_grad():
        left, _, right = torch.linalg.svd(matrix.double())
        return (left @ right).float(), [losses.tolist() for losses in curve]


def _mean_error(
    rows: torch.Tensor, matrix: torch.Tensor, root: torch.Tensor, codec: Codec
) -> torch.Tensor:
    """`E[e M e^T]` `[S, H]` of rows `[H, T, D]`, for a root L of M.

    This is a function so that only the graph holds its large tensors while the gradient is
    computed.
    """
    rotated = rows @ matrix
    error = (codec(rotated) - rotated) @ (matrix.mT @ root)
    return error.square().sum(-1).mean(-1)


def _metric_root(metric: torch.Tensor) -> torch.Tensor:
    """L `[H, D, D]`, float32, with `L L^T = M / trace(M)`, so that `e M e^T` is a squared norm."""
    metric = metric.double().cpu()
    trace = metric.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    ridge = _RIDGE * torch.eye(metric.shape[-1], dtype=torch.float64)
    root: torch.Tensor = torch.linalg.cholesky(metric / trace + ridge)
    return root.float()


def _cayley(skew: torch.Tensor) -> torch.Tensor:
    """The Cayley transform `(I - A/2)^-1 (I + A/2)` of skew-symmetric A `[..., D, D]`, which is
    orthogonal."""
    identity = torch.eye(skew.shape[-1], device=skew.device)
    rotation: torch.Tensor = torch.linalg.solve(identity - skew / 2, identity + skew / 2)
    return rotation
