"""Sampled queries and all that they read in one layer, on which candidate rotations are scored."""

from dataclasses import dataclass
from functools import cached_property

import torch

from rotationzoo.cache.divergence import divergence
from rotationzoo.model.capture import Attention

_ROUNDING = 1e-5  # float32 attention weights that are computed in two ways agree within this


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
        if self._scores is not None:
            weights = self.weights(restored)
            return weights, weights * self._reads_quantized
        count, length = len(restored), self.key.shape[2]
        keys = torch.cat([self.key.expand(count, -1, -1, -1), restored], dim=2)
        both = self.attend.weights(self.query.expand(count, -1, -1, -1), keys)
        exact_part, quantized_part = both[..., :length], both[..., length:]
        return exact_part + quantized_part, quantized_part

    def weights(self, restored: torch.Tensor) -> torch.Tensor:
        """The attention weights of `attention` alone.

        Where attention is a softmax of products and nothing else, the scores of exact keys are
        computed once for all caches, and no key is repeated for the query heads of its group.
        """
        if self._scores is None:
            return self.attention(restored)[0]
        read = self._products(restored)
        return torch.where(self._reads_quantized, read, self._scores).softmax(-1)

    def divergence(self, attention: torch.Tensor) -> torch.Tensor:
        """`KL(exact || attention)` `[S, H_kv]`, in nats, of attention weights `[S, H_q, Q, T]`.

        It is averaged over queries and over the query heads of each KV head.
        """
        if self._scores is None:
            by_head = divergence(self.exact, attention).mean(2)
        else:  # no sinks, so no probability is missing: the same sum with fewer large tensors
            logarithm = attention.clamp(min=1e-30).log_()
            exact = self.exact.expand_as(logarithm)
            terms = torch.nn.functional.kl_div(logarithm, exact, reduction="none")
            by_head = terms.sum(-1).mean(2)
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
        # Without the projection, heads cannot be added up, and their energies are summed instead.
        if self.projection is None:
            energy = change.square().sum((2, 4))
        else:
            heads = torch.unflatten(self.projection, 0, (-1, self.group))
            energy = torch.einsum("shgqd,hgdm->shqm", change, heads).square().sum(-1)
        return (energy / self._whole[:, None]).mean(-1)

    @cached_property
    def _whole(self) -> torch.Tensor:
        """The energy of the exact block output, `[1, Q]`."""
        exact = self._read(self.exact, self.value)
        if self.projection is None:
            return exact.square().sum((1, 2, 4))
        heads = torch.unflatten(self.projection, 0, (-1, self.group))
        return torch.einsum("shgqd,hgdm->sqm", exact, heads).square().sum(-1)

    def _read(self, attention: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The heads' outputs `[S, H_kv, G, Q, D_v]`; an argument with a first dimension of 1 serves
        all S."""
        group, count = self.group, max(len(attention), len(values))
        heads, queries = attention.shape[1] // group, attention.shape[2]
        # One product per KV head: its query heads are more rows of the same matrix. Cache by cache,
        # because one product over all of them would first copy what they share.
        rows = attention.reshape(len(attention), heads, group * queries, -1)
        pairs = zip(rows.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1), strict=True)
        read = torch.stack([weights @ stored for weights, stored in pairs])
        return torch.unflatten(read, 2, (group, queries))

    @property
    def _masks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two halves `[B or 1, 1, Q, T]` of the mask: of exact and of quantized copies."""
        mask, length = self.attend.mask, self.key.shape[2]
        assert isinstance(mask, torch.Tensor)
        return mask[..., :length], mask[..., length:]

    @cached_property
    def _reads_quantized(self) -> torch.Tensor:
        """Boolean `[1, 1, Q, T]`: whether a query reads the quantized copy of a position. For masks
        that only hide."""
        return self._masks[1] == 0

    @cached_property
    def _scores(self) -> torch.Tensor | None:
        """The scores `[1, H_q, Q, T]` of exact keys, or the lowest number where they are hidden;
        None if the model's attention is more than their softmax."""
        mask = torch.maximum(*self._masks)
        hidden = mask <= torch.finfo(torch.bfloat16).min
        if not (hidden | (mask == 0)).all():
            return None
        lowest = torch.finfo(torch.float32).min
        scores = self._products(self.key).masked_fill_(hidden, lowest)
        # This compares with the model's own attention: it may have a soft cap, or sinks.
        same = torch.allclose(scores.softmax(-1), self.exact, rtol=1e-4, atol=_ROUNDING)
        return scores if same else None

    def _products(self, keys: torch.Tensor) -> torch.Tensor:
        """Scaled products `[S, H_q, Q, T]` of the queries with keys `[S, H_kv, T, D]`."""
        scaling = self.attend.options.get("scaling")
        if scaling is None:
            scaling = self.query.shape[-1] ** -0.5
        queries = self.query.reshape(1, keys.shape[1], -1, self.query.shape[-1]) * scaling
        products: torch.Tensor = queries @ keys.mT
        return products.view(len(keys), self.query.shape[1], -1, keys.shape[2])
