"""Learns rotations by gradient descent on the orthogonal group, through the exact codec."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

TOKENS = 4096  # rows per step of learning
_RIDGE = 1e-9  # times the metric's trace; gives a metric of low rank a Cholesky factor
_POLISHING = 4  # iterations: 1e-4 from orthogonal becomes 1e-8, and then less than rounding

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


@dataclass(frozen=True)
class StoredRows:
    """Keys or values of one layer to learn from, as they were sampled, and what learning sees of
    them."""

    rows: torch.Tensor
    """`[N, H, D]`, in any floating type."""
    mean: torch.Tensor
    """The mean `[H, D]`, float32, that is subtracted."""
    equalizer: torch.Tensor | None = None
    """What takes rows to the folded frame before that: factors `[H, D]` or matrices
    `[H, D, D]`."""

    def take(self, drawn: torch.Tensor | slice) -> torch.Tensor:
        """The drawn rows `[H, n, D]`, float32."""
        rows = self.rows[drawn].transpose(0, 1).float()
        if self.equalizer is not None:
            factors = self.equalizer.ndim == 2
            rows = rows * self.equalizer[:, None] if factors else rows @ self.equalizer
        return rows - self.mean[:, None]


def learn_rotations(
    rows: Sequence[StoredRows],
    metric: torch.Tensor,
    start: torch.Tensor,
    codec: Codec,
    settings: LearningSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Learn rotations from S starts at once, of the heads of several layers; return them,
    `[S, H, D, D]` float32, and the losses by step, `[steps, S, H]`.

    - `rows`: keys or values that the caches of the layers store, as many of each; each step draws
      `settings.tokens` of them. H counts the heads of all layers.
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
    therefore replaced by the nearest orthogonal matrix.

    A fixed metric is a far smoother target than the softmax of a few sampled queries. Learning that
    fits sampled queries halves their own divergence but raises that of other queries.

    Every head learns by itself, so layers that are learned together learn what they would alone.
    Nothing in a step waits for the device.
    """
    device = start.device
    root = _metric_root(metric).to(device)
    energy = _mean_energy(rows, root)
    matrix = start.clone().requires_grad_()
    skew = torch.zeros_like(start)
    adam = torch.optim.Adam([skew], lr=settings.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, settings.steps)
    drawn = _draw_rows(len(rows[0].rows), settings).to(device)
    losses = []
    for step in range(settings.steps):
        if time.monotonic() > settings.deadline:
            break
        batch = torch.cat([part.take(drawn[step]) for part in rows])
        loss = _mean_error(batch, matrix, root, codec) / energy
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
        losses.append(loss.detach())
    curve = torch.stack(losses).cpu() if losses else torch.empty(0, *start.shape[:2])
    return _nearest_orthogonal(matrix.detach()), curve


def _draw_rows(count: int, settings: LearningSettings) -> torch.Tensor:
    """The rows `[steps, tokens]` that each step draws of `count`."""
    # Drawn on the CPU, so that every device learns from the same rows.
    generator = torch.Generator().manual_seed(settings.seed)
    draws = [
        torch.randint(count, (settings.tokens,), generator=generator) for _ in range(settings.steps)
    ]
    return torch.stack(draws)


@torch.no_grad()
def _mean_energy(rows: Sequence[StoredRows], root: torch.Tensor) -> torch.Tensor:
    """`E[x M x^T]` `[H]` over all rows, for a root L of M."""
    sums, start = [], 0
    for part in rows:
        stop = start + part.rows.shape[1]
        pieces = [slice(at, at + TOKENS) for at in range(0, len(part.rows), TOKENS)]
        by_piece = [
            (part.take(piece) @ root[start:stop]).square().sum((1, 2)).double() for piece in pieces
        ]
        sums.append(torch.stack(by_piece).sum(0) / len(part.rows))
        start = stop
    return torch.cat(sums).float()


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
    metric = metric.double()
    trace = metric.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    ridge = _RIDGE * torch.eye(metric.shape[-1], dtype=torch.float64, device=metric.device)
    root: torch.Tensor = torch.linalg.cholesky(metric / trace + ridge)
    return root.float()


def _cayley(skew: torch.Tensor) -> torch.Tensor:
    """The Cayley transform `(I - A/2)^-1 (I + A/2)` of skew-symmetric A `[..., D, D]`, which is
    orthogonal."""
    identity = torch.eye(skew.shape[-1], device=skew.device)
    # Without a check, which would wait for the device: I - A/2 is never singular, because the
    # eigenvalues of A are imaginary.
    rotation: torch.Tensor
    rotation, _ = torch.linalg.solve_ex(identity - skew / 2, identity + skew / 2)
    return rotation


def _nearest_orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The polar factor `U V^T` of matrices `U S V^T` `[..., D, D]` that are orthogonal but for
    rounding; float32.

    Newton-Schulz iterations `R <- R (3 I - R^T R) / 2` in float64 square the distance each time.
    They take products alone, where batches of singular value decompositions are slow on a GPU.
    """
    nearest = matrix.double()
    identity = torch.eye(matrix.shape[-1], dtype=torch.float64, device=matrix.device)
    for _ in range(_POLISHING):
        nearest = nearest @ (3 * identity - nearest.mT @ nearest) / 2
    return nearest.float()
