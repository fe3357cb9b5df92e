"""The triangular factor of a metric, with which errors of a row's channels make up for each
other (`codec.feedback`)."""

import torch

DAMPING = 0.01
"""Times the mean of the metric's diagonal, added to it. Directions that no query of the calibration
text reads then still count a little."""


def factorize(metric: torch.Tensor) -> torch.Tensor:
    """U and d of `M = U diag(d) U^T`, U unit upper triangular, for symmetric positive semidefinite
    metrics M `[H, D, D]`; float32 `[H, D, D]`, U with d on its diagonal.

    M is damped and scaled to a mean diagonal of 1 first, which changes no choice of codes. The
    product of all d is the determinant of M. Codes chosen channel by channel therefore err like the
    geometric mean of M's eigenvalues, and codes rounded by themselves like their arithmetic mean
    (QuIP, arXiv 2307.13304, theorem 1).
    """
    metric = metric.double().cpu()
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    # A metric of zeros, of a head that nothing reads, becomes the identity.
    scaled = metric / mean.clamp(min=torch.finfo(torch.float64).tiny)
    damped = scaled + DAMPING * torch.eye(metric.shape[-1], dtype=torch.float64)
    # The Cholesky factor of the reversed matrix is lower triangular; reversed again it is upper.
    lower: torch.Tensor = torch.linalg.cholesky(damped.flip(-2, -1))
    upper = lower.flip(-2, -1)
    roots = upper.diagonal(dim1=-2, dim2=-1)
    unit = upper / roots[:, None, :]
    return (unit.triu(1) + torch.diag_embed(roots.square())).float()


def remaining_share(factor: torch.Tensor) -> torch.Tensor:
    """By factors `[H, D, D]`: the mean error `e M e^T` of codes chosen channel by channel, as a
    share of that of codes rounded by themselves, `[H]`.

    It is the geometric mean of M's eigenvalues over their arithmetic mean, if the errors that are
    left in the channels have one variance and no correlation.
    """
    factor = factor.double()
    weights = factor.diagonal(dim1=-2, dim2=-1)
    unit = factor.triu(1) + torch.eye(factor.shape[-1], dtype=torch.float64)
    trace = (unit.square() * weights[:, None]).sum((-2, -1))
    share: torch.Tensor = weights.log().mean(-1).exp() * factor.shape[-1] / trace
    return share
