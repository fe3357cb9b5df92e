"""How far attention over a 2-bit cache diverges from attention over an exact one."""

import torch

_ROUNDING = 1e-5  # a softmax in float32 sums to 1 within this


def divergence(exact: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """`KL(exact || attention)` `[...]`, in nats, of attention weights `[..., T]`.

    A model's own attention sinks take part of the probability. That part counts as one more
    position.
    """
    p, q = _with_rest(exact), _with_rest(attention)
    # `xlogy` makes a position that the exact model ignores contribute 0. The clamp keeps the result
    # finite where the simulated weight underflows.
    return (torch.xlogy(p, p) - p * q.clamp(min=1e-30).log()).sum(-1)


def _with_rest(weights: torch.Tensor) -> torch.Tensor:
    """Append the probability that is missing from 1 as one more position. A remainder within
    rounding error becomes 0."""
    rest = 1 - weights.sum(-1, keepdim=True)
    return torch.cat([weights, rest.where(rest > _ROUNDING, 0)], dim=-1)
