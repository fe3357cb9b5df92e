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

DAMPING = 0.03
"""A share of the diagonal's mean, added to the metric, so that directions of few rows count."""
STEPS = (0.0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
"""The best step for a standard normal in codes of 0 to 8 bits (Max 1960, table II)."""
REMAINING = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.000304, 0.000087)
"""The share of its variance that these codes leave: each bit saves less than the one before it."""
MOST_BITS = len(REMAINING) - 1
SEGMENT = 4
"""Successive channels that have equal bits."""
WORD = 32
"""The bits of a row are a multiple of this: `WORD / SEGMENT` segments of one bit, of which the
scale takes the place of the first."""


@dataclass(frozen=True)
class Transform:
    """The basis of one side of a layer, float64. A row x has the channels `(x - mean) @
    forward`."""

    forward: torch.Tensor
    """`[H, D, D]`, with the strongest channels first."""
    deviations: torch.Tensor
    """Of the channels, `[H, D]`."""
    costs: torch.Tensor
    """The cost of a channel without bits, `[H, D]`, in the metric's unit."""


def decorrelate(
    covariance: torch.Tensor, metric: torch.Tensor, damping: float = DAMPING
) -> Transform:
    """The transform of rows with these covariances and metrics of errors, both `[H, D, D]` and
    symmetric positive semidefinite."""
    metric, covariance = metric.double().cpu(), covariance.double().cpu()
    size = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]
    # A metric of zeros, of a head that nothing reads, becomes the identity.
    scaled = metric / size[..., None].clamp(min=torch.finfo(torch.float64).tiny)
    eye = torch.eye(metric.shape[-1], dtype=torch.float64)
    values, vectors = eigenbasis(scaled + damping * eye)
    root = vectors * values.clamp(min=damping / 2).sqrt()[:, None] @ vectors.mT
    variances, basis = map(strongest_first, eigenbasis(root @ covariance @ root))
    variances = variances.clamp(min=0)
    return Transform(root @ basis, variances.sqrt(), size * variances)


def keep_basis(basis: torch.Tensor, covariance: torch.Tensor, metric: torch.Tensor) -> Transform:
    """The transform in an orthogonal basis `[H or 1, D, D]`, as if channels did not correlate."""
    metric, covariance, basis = (each.double().cpu() for each in (metric, covariance, basis))
    weights, variances = (
        (basis.mT @ each @ basis).diagonal(dim1=-2, dim2=-1).clamp(min=0)
        for each in (metric, covariance)
    )
    order = (weights * variances).argsort(dim=-1, descending=True, stable=True)
    weights, variances = weights.gather(-1, order), variances.gather(-1, order)
    size = weights.mean(-1, keepdim=True)
    tiny = torch.finfo(torch.float64).tiny
    scales = (weights / size.clamp(min=tiny)).clamp(min=DAMPING / 2).sqrt()
    columns = order[:, None].expand(-1, basis.shape[-1], -1)
    forward = basis.expand(len(order), -1, -1).gather(-1, columns) * scales[:, None]
    return Transform(forward, scales * variances.sqrt(), weights * variances)


def share_bits(costs: Sequence[torch.Tensor], bits: float) -> list[torch.Tensor]:
    """The bits (0 to 8) of each segment, int64 `[H, D / SEGMENT]`, from the costs `[H, D]` of each
    side: `bits` per element on average, with scales. A row without bits stores nothing."""
    left = torch.tensor(REMAINING, dtype=torch.float64)
    savings, words = [], []
    for its in costs:
        segments = its.double().cpu().unflatten(1, (-1, SEGMENT)).sum(-1)
        saved = (segments[..., None] * (left[:-1] - left[1:])).flatten(1)
        ordered = saved.sort(descending=True).values
        # The scale comes first. Zeros fill the last word.
        filled = torch.nn.functional.pad(ordered, (1, WORD // SEGMENT - 1))
        savings.append(saved)
        words.append(filled.unflatten(1, (-1, WORD // SEGMENT)).sum(-1))
    # Equal slopes: the words that save most, in any row.
    every = torch.cat([its.flatten() for its in words])
    budget = int(bits * sum(its.numel() for its in costs)) // WORD
    count = min(budget, int((every > 0).sum()))
    taken = torch.zeros_like(every, dtype=torch.int64)
    taken[every.argsort(descending=True, stable=True)[:count]] = 1
    shares = []
    for its, chosen in zip(savings, taken.split([its.numel() for its in words]), strict=True):
        size = chosen.view(len(its), -1).sum(-1, keepdim=True) * (WORD // SEGMENT) - 1
        ranks = its.argsort(descending=True, stable=True).argsort(stable=True)
        shares.append((ranks < size).unflatten(1, (-1, len(left) - 1)).sum(-1))
    return shares
