"""The Lloyd-Max quantizer of a normal distribution (Lloyd 1982, Max 1960), which TurboQuant rounds
keys with."""

from functools import cache

import torch

_ITERATIONS = 1000  # enough for 4 bits to converge to 1e-9


@cache
def gaussian_centroids(bits: int) -> torch.Tensor:
    """The `2^bits` centroids of N(0, 1) with the least mean squared error, ascending, float64.

    Each centroid is the mean of the distribution between the midpoints to its neighbours. The mean
    between a and b is `(phi(a) - phi(b)) / (Phi(b) - Phi(a))`.
    """
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    end = torch.full((1,), torch.inf, dtype=torch.float64)
    quantiles = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    centroids: torch.Tensor = normal.icdf(quantiles)
    for _ in range(_ITERATIONS):
        edges = torch.cat([-end, (centroids[1:] + centroids[:-1]) / 2, end])
        density = normal.log_prob(edges).exp()
        mass = normal.cdf(edges)
        centroids = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
    return centroids
