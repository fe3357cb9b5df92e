"""Sampled queries and all that they read in one layer, on which candidate rotations are scored."""

from dataclasses import dataclass

import torch

from rotationzoo.cache.divergence import divergence
from rotationzoo.model.capture import Attention


@dataclass(frozen=True)
class QuerySample:
    """Sampled queries `[1, H_q, Q, D]` of one text in one layer, and all of the text's keys and
    values `[1, H_kv, T, D]`.

    All are float32 and post-RoPE. `attend` is the model's own attention call, with its sliding
    windows, soft cap and attention sinks. Its mask is for keys `[exact; quantized]` of twice the
    length and shows each query one copy of each position: the exact copy in the cache's exact
    windows, the quantized one elsewhere.
    """

    attend: Attention
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    exact: torch.Tensor
    """The attention weights over exact keys, `[1, H_q, Q, T]`."""
    text: int
    """The number of the text. Layers that share a cache give several samples of the same text."""
    projection: torch.Tensor | None
    """The block's output projection by query head, `[H_q, D_v, hidden]`; None if it could not be
    read."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.key.shape[1]

    def attention(self, restored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention weights over keys `[S, H_kv, T, D]` as S caches return them.

        Returns the weights `[S, H_q, Q, T]`, and the part of them that falls on quantized keys.
        """
        count, length = len(restored), self.key.shape[2]
        keys = torch.cat([self.key.expand(count, -1, -1, -1), restored], dim=2)
        weights = self.attend.weights(self.query.expand(count, -1, -1, -1), keys)
        exact_part, quantized_part = weights[..., :length], weights[..., length:]
        return exact_part + quantized_part, quantized_part

    def divergence(self, attention: torch.Tensor) -> torch.Tensor:
        """`KL(exact || attention)` `[S, H_kv]`, in nats, of attention weights `[S, H_q, Q, T]`.

        It is averaged over queries and over the query heads of each KV head.
        """
        by_head = divergence(self.exact, attention).mean(2)
        return torch.unflatten(by_head, 1, (-1, self.group)).mean(2)

    def key_error(self, attention: torch.Tensor) -> torch.Tensor:
        """The `error` of reading exact values with attention weights `[S, H_q, Q, T]`."""
        return self.error(self._read(attention - self.exact, self.value))

    def value_error(self, quantized_part: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        """The `error` of values `[S, H_kv, T, D_v]` as caches return them.

        `quantized_part` `[1, H_q, Q, T]` holds the attention weights on quantized rows; only their
        values differ from the exact ones.
        """
        return self.error(self._read(quantized_part, restored - self.value))

    def error(self, change: torch.Tensor) -> torch.Tensor:
        """How much a change `[S, H_kv, G, Q, D_v]` of the heads' outputs changes the block's
        output, `[S, H_kv]`.

        This is the energy of the change, per KV head, relative to that of the exact block output,
        averaged over queries. The heads of a group add up in the residual stream, so their changes
        are added before they are squared.
        """
        exact = self._read(self.exact, self.value)
        # Without the projection, heads cannot be added up, and their energies are summed instead.
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
        """The heads' outputs `[S, H_kv, G, Q, D_v]`; an argument with a first dimension of 1 serves
        all S."""
        by_group = torch.unflatten(attention, 1, (-1, self.group))
        count = max(len(by_group), len(values))
        by_group = by_group.expand(count, *by_group.shape[1:])
        values = values.expand(count, *values.shape[1:])
        return torch.einsum("shgqt,shtd->shgqd", by_group, values)
