"""Transform coding: a basis in which channels do not correlate and squared errors cost the same,
and the bits of each channel (Goyal 2001, "Theoretical foundations of transform coding").

An error e of a row costs e M e^T. With A = M^(1/2), the covariance S of the rows, and the
eigenvectors B of A S A, the channels of `(row - mean) A B` do not correlate, and an error costs its
square. Bits then go where they save most (reverse water-filling, Cover and Thomas, 10.3.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rotationzoo.linalg.compositions import eigenbasis, strongest_first

DAMPING = 0.01
"""A share of the diagonal's mean, added to the metric, so that single rows' directions count."""
STEPS = (0.0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
"""The best step for a Gaussian of deviation 1 in codes of 0 to 8 bits (Max 1960, table II)."""
REMAINING = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.000304, 0.000087)
"""What these codes leave of its variance: each bit saves less than the one before it."""
SCALE_BITS = 3
"""Bits of a row's scale."""
UNIT = 16
"""The bits that a head's row takes, with its scale, are a multiple of this."""


@dataclass(frozen=True)
class Transform:
    """The basis of one side of a layer, float64: a row x has the channels `(x - mean) @ forward`,
    the strongest first."""

    forward: torch.Tensor
    """`[H, D, D]`"""
    inverse: torch.Tensor
    """`[H, D, D]`"""
    deviations: torch.Tensor
    """Of the channels, `[H, D]`."""
    costs: torch.Tensor
    """What a channel without bits costs, `[H, D]`, in the metric's unit."""


def decorrelate(
    covariance: torch.Tensor, metric: torch.Tensor, damping: float = DAMPING
) -> Transform:
    """The transform of rows with these covariances, whose errors cost what the metrics say, both
    symmetric positive semidefinite `[H, D, D]`."""
    metric, covariance = metric.double().cpu(), covariance.double().cpu()
    size = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]
    # A metric of zeros, of a head that nothing reads, becomes the identity.
    scaled = metric / size[..., None].clamp(min=torch.finfo(torch.float64).tiny)
    eye = torch.eye(metric.shape[-1], dtype=torch.float64)
    values, vectors = eigenbasis(scaled + damping * eye)
    roots = values.clamp(min=damping / 2).sqrt()[:, None]
    root, inverse_root = (vectors * each @ vectors.mT for each in (roots, 1 / roots))
    variances, basis = map(strongest_first, eigenbasis(root @ covariance @ root))
    variances = variances.clamp(min=0)
    return Transform(root @ basis, basis.mT @ inverse_root, variances.sqrt(), size * variances)


def share_bits(costs: Sequence[torch.Tensor], bits: float) -> list[torch.Tensor]:
    """The bits 0 to 8 of all channels, int64 `[H, D]` each, from their costs `[H, D]`, so that rows
    take `bits` an element on average, with their scales. A row that gets no bits stores nothing."""
    losses = torch.tensor(REMAINING, dtype=torch.float64)
    saved = losses[:-1] - losses[1:]
    savings = [(its.double().cpu()[..., None] * saved).flatten(1) for its in costs]
    rows = [len(its) for its in savings]
    left = bits * sum(its.numel() for its in costs)
    # Equal slopes: the bits that save most, wherever they are.
    every = torch.cat([its.flatten() for its in savings])
    count = min(max(0, int(left - SCALE_BITS * sum(rows))), len(every))
    least = every.topk(count).values[-1] if count else every.new_tensor(torch.inf)
    wanted = torch.cat([(its >= least).sum(-1) + SCALE_BITS for its in savings])
    sizes = wanted // UNIT * UNIT
    # What rounding down leaves goes to the rows that miss most of a unit.
    units = max(0, int(left - sizes.sum().item()) // UNIT)
    missing = (wanted % UNIT).argsort(descending=True, stable=True)[:units]
    sizes[missing] += UNIT
    shares = []
    for its, size, cost in zip(savings, sizes.split(rows), costs, strict=True):
        ranks = its.argsort(descending=True, stable=True).argsort(stable=True)
        taken = ranks < (size - SCALE_BITS)[:, None]
        shares.append(taken.unflatten(1, (cost.shape[1], -1)).sum(-1))
    return shares
