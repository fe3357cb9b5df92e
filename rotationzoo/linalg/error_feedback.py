"""The matrices of error feedback (`codec.feedback`): a metric's triangular factor, which lets
channels compensate for each other's errors, and a whitening, which evens out their ranges."""

import torch

from rotationzoo.linalg.compositions import eigenbasis

DAMPING = 0.01
"""A share of the diagonal's mean, added to the metric, so that unread directions count a little."""
SHARE = 0.5
"""Of the way to white rows: 0 leaves them as they are, and 1 whitens them."""


def factorize(metric: torch.Tensor) -> torch.Tensor:
    """U and d of `M = U diag(d) U^T`, U unit upper triangular, for symmetric positive semidefinite
    metrics M `[H, D, D]`; float32 `[H, D, D]`, U with d on its diagonal.

    M is first damped and scaled to a mean diagonal of 1, which changes no code. The product of all
    d is det M. So codes chosen channel by channel err like the geometric mean of M's eigenvalues,
    and nearest codes like the arithmetic mean (QuIP, arXiv 2307.13304, theorem 1).
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


def whitening(moment: torch.Tensor) -> torch.Tensor:
    """The symmetric W = S^(-1/4) of second moments S `[H, D, D]`, damped, with determinant 1.

    Rows times W are half way to white ones. Codes share a step, so their errors grow with the
    arithmetic mean of the rows' spectrum, and feedback's on white rows with the geometric mean. But
    white rows peak where the calibration text does not; half way loses least (docs/history.md).
    """
    values, vectors = eigenbasis(moment)
    level = values.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    logs = (values / level).clamp(min=0).add(DAMPING).log()
    powers = ((logs - logs.mean(-1, keepdim=True)) * (-SHARE / 2)).exp()
    product: torch.Tensor = vectors @ torch.diag_embed(powers) @ vectors.mT
    return product.float().contiguous()


def remaining_share(factor: torch.Tensor) -> torch.Tensor:
    """The error `e M e^T` of codes by feedback as a share `[H]` of nearest codes', from factors.

    It is the geometric over the arithmetic mean of M's eigenvalues, if remaining errors are white.
    """
    factor = factor.double()
    weights = factor.diagonal(dim1=-2, dim2=-1)
    unit = factor.triu(1) + torch.eye(factor.shape[-1], dtype=torch.float64)
    trace = (unit.square() * weights[:, None]).sum((-2, -1))
    share: torch.Tensor = weights.log().mean(-1).exp() * factor.shape[-1] / trace
    return share
