"""Attention over latents (MLA): the rows that a layer caches, and what errors of latents cost.

A layer caches a latent `c` and a key `k` with RoPE, which all heads share. A projection `kv_b_proj`
makes each head's keys `[c W_K^T, k]` and values `c W_V^T` before attention is called."""

from dataclasses import dataclass
from typing import Any

import torch

from rotationzoo.linalg.moments import Moment
from rotationzoo.model.capture import Call
from rotationzoo.sides import LATENT

_SEED = 0
_UP, _OUTPUT = "kv_b_proj", "o_proj"  # the names of these projections in transformers


Rows = tuple[torch.Tensor, torch.Tensor]
"""The two tensors `[B, H, T, D]` of a transformers cache layer: keys and values, or latents."""


@dataclass(frozen=True)
class Heads:
    """A layer's cache that holds keys and values, as attention reads them."""

    call: Call

    @property
    def sides(self) -> dict[str, torch.Tensor]:
        """Side -> the rows `[B, H, T, D]` that the cache holds."""
        return {"key": self.call.key, "value": self.call.value}

    def read(self, sides: dict[str, torch.Tensor]) -> Rows:
        """The keys and values that attention reads if the cache holds these rows."""
        return sides["key"], sides["value"]

    def is_in(self, rows: Rows | None) -> bool:
        """Whether the rows of a cache layer are these. If it has none, another layer may."""
        pairs = zip(rows or (), (self.call.key, self.call.value), strict=False)
        return all(one.shape[1::2] == other.shape[1::2] for one, other in pairs)


class Latents(Heads):
    """A layer's cache that holds latents, from which keys and values are made."""

    @property
    def sides(self) -> dict[str, torch.Tensor]:
        assert self.call.attend.latent is not None
        return {LATENT: self.call.attend.latent}

    def read(self, sides: dict[str, torch.Tensor]) -> Rows:
        if sides[LATENT] is self.call.attend.latent:
            return self.call.key, self.call.value
        return expand(self.call, sides[LATENT])

    def is_in(self, rows: Rows | None) -> bool:
        """Whether a cache layer holds latents and RoPE keys that all heads share, as in some
        versions of transformers. On `meta`, only shapes are compared."""
        call, latent = self.call, self.sides[LATENT]
        if rows is None or not hasattr(call.attend.module, _OUTPUT):
            return False
        latents, rope = rows
        width = call.key.shape[-1] - rope.shape[-1]
        if latents.shape != latent.shape or (latents.shape[1], rope.shape[1]) != (1, 1):
            return False
        keys, values = expand(call, latent)
        shared = call.key[..., width:]
        pairs = [(keys, call.key), (values, call.value), (latents, latent)]
        if width <= 0 or any(one.shape != other.shape for one, other in pairs):
            return False
        pairs.append((rope.expand_as(shared), shared))
        for one, other in pairs if not call.key.is_meta else ():
            # The same product, up to the order of its sums.
            allowed = 64 * torch.finfo(one.dtype).eps * float(other.abs().max())
            if not (one - other).abs().max() <= allowed:
                return False
        return True


def cached_of(call: Call) -> Heads:
    """The rows that the layer of an attention call caches."""
    return Heads(call) if call.attend.latent is None else Latents(call)


def expand(call: Call, latents: torch.Tensor) -> Rows:
    """The keys `[B, H, T, D_k]` and values `[B, H, T, D_v]` of latents `[B, 1, T, R]` of a call."""
    # `forward`, because calling the module would run the hook that captures latents.
    up: Any = getattr(call.attend.module, _UP)
    key, value_dim = call.key, call.value.shape[-1]
    expanded: torch.Tensor = up.forward(latents[:, 0].to(key.dtype))
    heads = expanded.unflatten(-1, (key.shape[1], -1)).transpose(1, 2)
    plain, values = heads.split([heads.shape[-1] - value_dim, value_dim], dim=-1)
    return torch.cat([plain, key[..., plain.shape[-1] :]], dim=-1), values.contiguous()


def _weights_of(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W_K `[H, N, R]`, W_V `[H, D_v, R]` and `W_O^T W_O` `[H, D_v, D_v]` of a call, in one dtype of
    at least float32, from the outputs of its modules for an identity."""
    attend, heads, value_dim = call.attend, call.query.shape[1], call.value.shape[-1]
    assert attend.latent is not None
    latent, width = attend.latent, heads * value_dim
    wide = torch.promote_types(latent.dtype, torch.float32)
    up: Any = getattr(attend.module, _UP)
    out: Any = getattr(attend.module, _OUTPUT)
    identity = torch.eye(latent.shape[-1], dtype=latent.dtype, device=latent.device)
    by_head = up.forward(identity).T.to(wide).unflatten(0, (heads, -1))
    key, value = by_head.split([by_head.shape[1] - value_dim, value_dim], dim=1)
    bias = out.forward(latent.new_zeros(1, width)).to(wide)
    grams = []
    for head in range(heads):
        rows = latent.new_zeros(value_dim, width)
        rows[:, head * value_dim : (head + 1) * value_dim].fill_diagonal_(1)
        weight = out.forward(rows).to(wide) - bias
        grams.append(weight @ weight.T)
    return key, value, torch.stack(grams)


@dataclass(frozen=True)
class ReadErrors:
    """What errors of latents cost, to first order, by the queries of one attention call.

    An error `e` of the latent of token s changes the output of the layer at token t by the sum over
    heads of `p (e W_V^T W_O^T)`, because the value changes, which has the attention weight p, and
    of `p (a e^T) (v_s - o) W_O^T`, because its score changes by `a e^T`: a is the absorbed query
    `q W_K` times the scale of the softmax, v_s the value and o the head's output. For errors of
    mean 0 that are independent between tokens, the expected squares add up over tokens, as

        e (a^T a) e^T * sum of p^2 |(v_s - o) W_O^T|^2  +  |e W_V^T W_O^T|^2 * sum of p^2,

    without products of two heads, or of the two terms of a head.
    """

    queries: torch.Tensor
    """`[B, H, T, N]`: queries without RoPE; the scaled first term is `(query W_K e^T)^2`."""
    key_weight: torch.Tensor  # W_K `[H, N, R]`, float64
    value_metric: torch.Tensor
    """`[R, R]`, float64: the second term is `e value_metric e^T`, summed over all queries."""

    def absorb(self, moment: Moment) -> Moment:
        """Sum the absorbed queries of all heads, from the `moment` of `queries` by head."""
        weight = self.key_weight
        second = weight.mT @ moment.second @ weight
        first = (moment.first[:, None] @ weight)[:, 0]
        return Moment(*(each.sum(0, keepdim=True) for each in (second, first, moment.weight)))


@torch.no_grad()
def read_errors(call: Call, output: torch.Tensor, skip: int) -> ReadErrors:
    """What errors of latents cost by a call and its output `[B, T, H, D_v]`, if the first `skip`
    tokens are exact. The sum over tokens of `p^2 f_s` is the mean square of `sum of p z_s f_s` for
    random signs z, so the model's own attention estimates it, without a T x T matrix."""
    query, key, value, attend = call.query, call.key, call.value, call.attend
    key_weight, value_weight, gram = _weights_of(call)
    wide = key_weight.dtype
    signs = _signs(value.shape[2], value.shape[3], skip).to(value)
    shares = attend(query, key, signs.expand_as(value).contiguous()).transpose(1, 2).to(wide)
    moved = attend(query, key, value * signs[:, :1]).transpose(1, 2).to(wide)
    # The values were multiplied by the first column of the signs.
    moved = moved - shares[..., :1] * output.transpose(1, 2).to(wide)
    cost = ((moved @ gram) * moved).sum(-1, keepdim=True).clamp(min=0)
    scale = attend.options.get("scaling") or query.shape[-1] ** -0.5
    queries = query[..., : key_weight.shape[1]].to(wide) * (scale * cost.sqrt())
    squares = shares.double().square().mean(-1).sum((0, 2))[:, None, None]
    through = value_weight.double()
    metric = through.mT @ (squares * gram.double()) @ through
    return ReadErrors(queries, key_weight.double(), metric.sum(0))


def _signs(tokens: int, columns: int, skip: int) -> torch.Tensor:
    """Random signs `[T, columns]`, the same in every call, and 0 for the first `skip` tokens."""
    generator = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(2, (tokens, columns), generator=generator).float() * 2 - 1
    signs[:skip] = 0
    return signs
