"""How far attention over a 2-bit cache is from attention over an exact one."""

import torch

_ROUNDING = 1e-5  # a softmax in float32 sums to 1 within this


def divergence(exact: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """KL `[...]` in nats of two attentions `[..., T]`. The part that a model's sinks take counts as
    one more position."""
    p, q = _with_rest(exact), _with_rest(attention)
    return (torch.xlogy(p, p) - p * q.clamp(min=1e-30).log()).sum(-1)


def _with_rest(weights: torch.Tensor) -> torch.Tensor:
    """With the rest to 1 as one more position; a rest as small as rounding leaves is 0."""
    rest = 1 - weights.sum(-1, keepdim=True)
    return torch.cat([weights, rest.where(rest > _ROUNDING, 0)], dim=-1)
