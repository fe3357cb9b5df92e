"""Some queries of some texts with all that they read: what candidates are scored on, layer by layer."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.capture import Attention, decoder, intercept
from rotationzoo.geometry import Geometry
from rotationzoo.models import input_device
from rotationzoo.simulate import Cache, additive, divergence, doubled


@dataclass(frozen=True)
class Sample:
    """One text in one layer: sampled queries `[1, H_q, Q, D]`, all keys and values `[1, H_kv, T, D]`, float32, post-RoPE.

    `attend` is the model's own call with its windows, soft cap and sinks; its mask shows each query one copy of each position:
    the exact one in the cache's windows, the stored one elsewhere.
    """

    attend: Attention
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    exact: torch.Tensor
    """The attention over exact keys, `[1, H_q, Q, T]`."""
    projection: torch.Tensor | None
    """What the block's output projection makes of each query head, `[H_q, D_v, hidden]`; None where none was found."""

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def attention(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention `[S, H_q, Q, T]` over keys `[S, H_kv, T, D]` as they come back from S caches, and the part that reads such
        keys."""
        count, length = len(stored), self.key.shape[2]
        keys = torch.cat([self.key.expand(count, -1, -1, -1), stored], dim=2)
        both = self.attend.weights(self.query.expand(count, -1, -1, -1), keys)
        return both[..., :length] + both[..., length:], both[..., length:]

    def divergence(self, attention: torch.Tensor) -> torch.Tensor:
        """KL of the exact attention to these `[S, H_q, Q, T]` in nats, mean over queries and the heads that read a KV head,
        `[S, H_kv]`.

        Queries weigh by how much they look for single stored tokens, the norm of their attention to what is stored: losing one
        of these costs the model more than the same divergence where attention is spread.
        """
        weight = self._stored_part().norm(dim=-1) + _LEAST
        return self._mean(divergence(self.exact, attention) * weight) / self._mean(weight)

    def _stored_part(self) -> torch.Tensor:
        """The exact attention to positions whose stored copy is read, `[1, H_q, Q, T]`."""
        mask = self.attend.mask
        assert mask is not None
        return self.exact * (mask[..., self.key.shape[2] :] > torch.finfo(mask.dtype).min / 2)

    def _mean(self, by_query: torch.Tensor) -> torch.Tensor:
        return by_query.mean(2).unflatten(1, (-1, self.group)).mean(2)

    def error(self, stored: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Energy of what values `[S, H_kv, T, D_v]` as they come back change in the block's output, per KV head and relative to
        the block's own, `[S, H_kv]`. `part` `[1, H_q, Q, T]` is the attention that reads them.

        The heads of a group add up in the residual stream, so their errors do before they are squared.
        """
        difference = self._outputs(part, stored - self.value)
        whole = self._outputs(self.exact, self.value)
        if self.projection is None:
            return difference.square().sum((2, 3, 4)) / whole.square().sum()
        heads = self.projection.unflatten(0, (-1, self.group))
        changed = torch.einsum("shgqd,hgdm->shqm", difference, heads)
        block = torch.einsum("shgqd,hgdm->sqm", whole, heads)
        return changed.square().sum((2, 3)) / block.square().sum()

    def _outputs(self, attention: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`[S, H_kv, G, Q, D_v]`."""
        return torch.einsum("hgqt,shtd->shgqd", attention[0].unflatten(0, (-1, self.group)), values)


_LEAST = 1e-3  # weight of a query that reads nothing that is stored

Samples = Mapping[int, list[Sample]]
"""Layer that owns a cache -> samples of all layers that read it."""


@torch.no_grad()
def take(
    model: PreTrainedModel,
    geometry: Geometry,
    rows: Iterable[torch.Tensor],
    cache: Cache,
    queries: int,
    layers: set[int],
    projections: Mapping[int, torch.Tensor],
    seed: int = 0,
) -> Samples:
    """Run texts `[T]` and keep `queries` queries of each, drawn past the windows, in the layers that own or read the caches of
    `layers`."""
    owners = {layer.index: layer.owner for layer in geometry if layer.owner in layers}
    taken: dict[int, list[Sample]] = {layer: [] for layer in layers}
    for number, row in enumerate(rows):
        past = range(cache.first_quantized, len(row))
        chosen = sorted(random.Random(f"{seed} {number}").sample(past, min(queries, len(past))))
        if not chosen:
            continue
        at = torch.tensor(chosen)

        def keep(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention, at: torch.Tensor = at
        ) -> torch.Tensor:
            if layer in owners:
                here = at.to(query.device)
                mask = additive(doubled(attend, query, cache)[:, :, here], torch.float32)
                length = key.shape[2]
                whole = torch.maximum(mask[..., :length], mask[..., length:])
                some, keys, values = query[:, :, here].float(), key.float(), value.float()
                exact = replace(attend, mask=whole).weights(some, keys)
                sample = Sample(replace(attend, mask=mask), some, keys, values, exact, projections.get(layer))
                taken[owners[layer]].append(sample)
            return attend(query, key, value)

        with intercept(model, keep):
            decoder(model)(input_ids=row[None].to(input_device(model)), use_cache=False)
    return taken


@torch.no_grad()
def output_projections(model: PreTrainedModel, geometry: Geometry) -> dict[int, torch.Tensor]:
    """Each layer's output projection by query head, `[H_q, D_v, hidden]` float32: the first linear map of the right width that
    is run after a layer's attention. Layers without one, or whose weights are quantized, are absent."""
    widths = {layer.index: layer.query_heads * layer.value_dim for layer in geometry}
    heads = {layer.index: layer.query_heads for layer in geometry}
    waiting: list[int] = []
    found: dict[int, torch.Tensor] = {}

    def ran(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention) -> torch.Tensor:
        waiting[:] = [layer]
        return attend(query, key, value)

    def see(module: torch.nn.Module, args: Any) -> None:
        if waiting and isinstance(module, torch.nn.Linear) and module.in_features == widths[waiting[0]]:
            layer = waiting.pop()
            if module.weight.is_floating_point() and module.weight.itemsize > 1 and not module.weight.is_meta:
                found[layer] = module.weight.float().T.unflatten(0, (heads[layer], -1)).contiguous()

    hooks: list[Any] = [m.register_forward_pre_hook(see) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    try:
        with intercept(model, ran):
            decoder(model)(input_ids=torch.zeros(1, 8, dtype=torch.long, device=input_device(model)), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found
