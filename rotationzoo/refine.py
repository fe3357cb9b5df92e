"""Learning a rotation through the exact codec: R = R0 expm(A - A^T), with a straight-through gradient for the rounding."""

import random
import time
from collections.abc import Callable, Sequence

import torch

from rotationzoo import int2
from rotationzoo.sample import Sample


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


def learn(
    samples: Sequence[Sample],
    start: torch.Tensor,
    loss: Callable[[Sample, torch.Tensor], torch.Tensor],
    steps: int,
    rate: float,
    texts: int = 4,
    seed: int = 0,
    deadline: float | None = None,
) -> tuple[torch.Tensor, list[list[float]]]:
    """Rotations `[S, H, D, D]` float32 after Adam on `texts` samples a step with a cosine rate, and the S losses by step.

    `loss` maps a sample and rotations to `[S, H]`; none of them share parameters. `deadline` (`time.monotonic()`) ends it
    early, before the first step if it has passed. Re-orthogonalised in float64 by the polar decomposition.
    """
    free = torch.zeros_like(start, requires_grad=True)
    adam = torch.optim.Adam([free], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    draw = random.Random(seed)
    curve: list[list[float]] = []
    for _ in range(steps):
        if deadline is not None and time.monotonic() > deadline:
            break
        matrix = start @ torch.matrix_exp(free - free.mT)
        chosen = draw.sample(list(samples), min(texts, len(samples)))
        total = torch.stack([loss(sample, matrix) for sample in chosen]).mean(0).sum(-1)
        adam.zero_grad()
        total.sum().backward()
        adam.step()
        schedule.step()
        curve.append(total.tolist())
    with torch.no_grad():
        turned = start.double() @ torch.matrix_exp((free - free.mT).double())
        left, _, right = torch.linalg.svd(turned)
        return (left @ right).float(), curve
