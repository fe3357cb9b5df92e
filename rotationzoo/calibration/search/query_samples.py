"""Sampled queries of one text in one layer, with all that they read: what candidates for a rotation
are scored on."""

from dataclasses import dataclass

import torch

from rotationzoo.cache.divergence import divergence
from rotationzoo.model.capture import Attention


@dataclass(frozen=True)
class QuerySample:
    """Sampled queries `[1, H_q, Q, D]`, and all keys and values `[1, H_kv, T, D]` of the text,
    float32 and post-RoPE.

    `attend` is the model's own call with its windows, soft cap and sinks. Its mask is for keys
    `[exact; quantized]` of twice the length and shows each query one copy of each position: the
    exact one in the cache's windows, the quantized one elsewhere.
    """

    attend: Attention
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    exact: torch.Tensor
    """The attention over exact keys, `[1, H_q, Q, T]`."""
    text: int
    """The number of the text. Layers that read one cache give several samples of each text."""
    projection: torch.Tensor | None
    """The block's output projection by query head, `[H_q, D_v, hidden]`; None where it could not be
    read."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.key.shape[1]

    def attention(self, restored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention `[S, H_q, Q, T]` over keys `[S, H_kv, T, D]` as S caches give them back, and
        the part of it that reads quantized keys."""
        count, length = len(restored), self.key.shape[2]
        keys = torch.cat([self.key.expand(count, -1, -1, -1), restored], dim=2)
        weights = self.attend.weights(self.query.expand(count, -1, -1, -1), keys)
        exact_part, quantized_part = weights[..., :length], weights[..., length:]
        return exact_part + quantized_part, quantized_part

    def divergence(self, attention: torch.Tensor) -> torch.Tensor:
        """KL in nats of the exact attention to attention `[S, H_q, Q, T]`, mean over queries and
        the heads that read a KV head, `[S, H_kv]`."""
        by_head = divergence(self.exact, attention).mean(2)
        return torch.unflatten(by_head, 1, (-1, self.group)).mean(2)

    def key_error(self, attention: torch.Tensor) -> torch.Tensor:
        """The `error` of reading exact values with attention `[S, H_q, Q, T]`."""
        return self.error(self._read(attention - self.exact, self.value))

    def value_error(self, quantized_part: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        """The `error` of values `[S, H_kv, T, D_v]` as caches give them back, where attention
        `[1, H_q, Q, T]` reads quantized rows."""
        return self.error(self._read(quantized_part, restored - self.value))

    def error(self, change: torch.Tensor) -> torch.Tensor:
        """What a change `[S, H_kv, G, Q, D_v]` of the heads' outputs does to the block's output,
        per KV head `[S, H_kv]`: its energy relative to that of the exact output, mean over queries.

        The heads of a group add up in the residual stream, so their changes are added before they
        are squared.
        """
        exact = self._read(self.exact, self.value)
        if self.projection is None:
            energy = change.square().sum((2, 4))
            whole = exact.square().sum((1, 2, 4))
        else:
            heads = torch.unflatten(self.projection, 0, (-1, self.group))
            block = torch.einsum("shgqd,hgdm->sqm", exact, heads)
            energy = torch.einsum("shgqd,hgdm->shqm", change, heads).square().sum(-1)
            whole = block.square().sum(-1)
        return (energy / whole[:, None]).mean(-1)

    def _read(self, attention: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The heads' outputs `[S, H_kv, G, Q, D_v]`; either argument may be one for all S."""
        by_group = torch.unflatten(attention, 1, (-1, self.group))
        count = max(len(by_group), len(values))
        by_group = by_group.expand(count, *by_group.shape[1:])
        values = values.expand(count, *values.shape[1:])
        return torch.einsum("shgqt,shtd->shgqd", by_group, values)
