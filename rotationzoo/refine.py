"""Learning a rotation through the exact codec, with a straight-through gradient for the rounding."""

import time
from collections.abc import Callable

import torch

from rotationzoo import int2


def straight_through(rows: torch.Tensor, clip: torch.Tensor, group_size: int | None, form: int2.Format) -> torch.Tensor:
    """`int2.round_trip`, bit by bit, with the gradient of its formula in which rounding counts as nothing.

    Scale and threshold are part of that gradient: a smaller range is what makes a rotation better.
    """
    with torch.no_grad():
        exact = int2.round_trip(rows, clip, group_size, form)
    if not rows.requires_grad:
        return exact
    groups = rows.unflatten(-1, (-1, group_size or rows.shape[-1]))
    if form.clip_scope == "row":
        threshold = int2.clip_threshold(rows, clip, form.interpolated)[..., None, None]
    else:
        threshold = int2.clip_threshold(groups, clip.unsqueeze(-1), form.interpolated)[..., None]
    clamped = torch.maximum(torch.minimum(groups, threshold), -threshold)
    low, high = clamped.amin(-1, keepdim=True), clamped.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-8) / 3
    steps = (clamped - low) / scale
    codes = steps + ((steps + 0.5).trunc().clamp(0, 3) - steps).detach()
    smooth = (codes * scale + low).flatten(-2)
    return smooth + (exact - smooth).detach()


_LEAST = 1e-9  # of the metric's trace, so that a metric of low rank has a root


def learn(
    rows: torch.Tensor,
    metric: torch.Tensor,
    start: torch.Tensor,
    back: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    steps: int,
    rate: float,
    tokens: int = 1024,
    seed: int = 0,
    deadline: float | None = None,
) -> tuple[torch.Tensor, list[list[float]]]:
    """Rotations `[S, H, D, D]` float32 that lower `E[e M e^T]`, e the error of a stored row, and the S losses by step.

    `rows` are `[H, N, D]`, `metric` M `[H, D, D]` is how errors count, `back` maps rows and rotations to rows as they come
    back. Every step multiplies by the Cayley transform `(I - A/2)^-1 (I + A/2)` of a skew-symmetric A: Adam's step, with a
    cosine rate, on `tokens` random rows. Losses are relative to the rows' own energy. `deadline` (`time.monotonic()`) ends it
    early, before the first step if it has passed. Re-orthogonalised in float64 by the polar decomposition.

    A fixed metric is a far smoother target than the softmax of some sampled queries: learning that fits them lowers their
    divergence by half and raises that of others.
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
        if deadline is not None and time.monotonic() > deadline:
            break
        some = rows[:, torch.randint(rows.shape[1], (tokens,), generator=draw).to(rows.device)]
        loss = ((back(some[None], matrix) - some) @ root).square().sum(-1).mean(-1) / energy
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
