"""Some queries of some texts with all that they read: what candidates are scored on, layer by
layer."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.divergence import divergence
from rotationzoo.cache.masks import as_additive, two_copy_mask
from rotationzoo.cache.windows import Cache
from rotationzoo.model.capture import Attention, capture, decoder, intercept
from rotationzoo.model.geometry import Geometry, Layer
from rotationzoo.model.loading import input_device
from rotationzoo.recipe import Search

SAMPLE_BYTES = (
    4_000_000_000  # bytes of samples, of as many layers as that is enough for, at least one
)
LEARNING_TOKENS = 2048  # tokens of a text whose keys and values are learned from


@dataclass(frozen=True)
class QuerySample:
    """One text in one layer: sampled queries `[1, H_q, Q, D]`, all keys and values `[1, H_kv, T,
    D]`, float32, post-RoPE.

    `attend` is the model's own call with its windows, soft cap and sinks; its mask shows each query
    one copy of each position: the exact one in the cache's windows, the stored one elsewhere.
    """

    attend: Attention
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    exact: torch.Tensor
    """The attention over exact keys, `[1, H_q, Q, T]`."""
    text: int
    """Number of the text: layers that read one cache give several samples of each."""
    projection: torch.Tensor | None
    """What the block's output projection makes of each query head, `[H_q, D_v, hidden]`; None where
    none was found."""

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def attention(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention `[S, H_q, Q, T]` over keys `[S, H_kv, T, D]` as they come back from S caches,
        and the part that reads such keys."""
        count, length = len(stored), self.key.shape[2]
        keys = torch.cat([self.key.expand(count, -1, -1, -1), stored], dim=2)
        both = self.attend.weights(self.query.expand(count, -1, -1, -1), keys)
        return both[..., :length] + both[..., length:], both[..., length:]

    def divergence(self, attention: torch.Tensor) -> torch.Tensor:
        """KL of the exact attention to these `[S, H_q, Q, T]` in nats, mean over queries and the
        heads that read a KV head, `[S, H_kv]`."""
        return divergence(self.exact, attention).mean(2).unflatten(1, (-1, self.group)).mean(2)

    def key_error(self, attention: torch.Tensor) -> torch.Tensor:
        """`error` of attention `[S, H_q, Q, T]` to exact values."""
        return self.error(self._read(attention - self.exact, self.value))

    def value_error(self, part: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """`error` of values `[S, H_kv, T, D_v]` as they come back, where the attention `part` `[1,
        H_q, Q, T]` reads them."""
        return self.error(self._read(part, stored - self.value))

    def error(self, change: torch.Tensor) -> torch.Tensor:
        """What a change `[S, H_kv, G, Q, D_v]` of the heads' outputs does to the block's, per KV
        head `[S, H_kv]`: its energy relative to that of the block's exact output, query by query,
        mean over queries.

        The heads of a group add up in the residual stream, so their changes do before they are
        squared.
        """
        exact = self._read(self.exact, self.value)
        if self.projection is None:
            ratio = change.square().sum((2, 4)) / exact.square().sum((1, 2, 4))[:, None]
        else:
            heads = self.projection.unflatten(0, (-1, self.group))
            block = torch.einsum("shgqd,hgdm->sqm", exact, heads)
            ratio = (
                torch.einsum("shgqd,hgdm->shqm", change, heads).square().sum(-1)
                / block.square().sum(-1)[:, None]
            )
        return ratio.mean(-1)

    def _read(self, attention: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`[S, H_kv, G, Q, D_v]`; either argument may be one for all S."""
        return torch.einsum(
            "shgqt,shtd->shgqd", *_alike(attention.unflatten(1, (-1, self.group)), values)
        )


def _alike(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = max(len(one), len(other))
    return one.expand(count, *one.shape[1:]), other.expand(count, *other.shape[1:])


def _draw(text: int, positions: range, count: int) -> list[int]:
    """At most `count` of them, sorted, the same in every run."""
    return sorted(random.Random(f"0 {text}").sample(positions, min(count, len(positions))))


def size_of(
    geometry: Geometry,
    layer: Layer,
    settings: Search,
    judged: Sequence[int],
    taught: Sequence[int],
    hidden: int,
) -> int:
    """Bytes of all that is held of a layer's cache, float32: keys, values, attention and mask of
    each text that choices are judged on, keys and values of those that are learned from, and the
    output projections of the layers that read it. Texts are given by their tokens; `hidden` is the
    width of the residual stream."""
    width = layer.kv_heads * (layer.key_dim + layer.value_dim)
    readers = [reader for reader in geometry if reader.owner == layer.index]
    read = sum(width + settings.queries * (reader.query_heads + 2) for reader in readers)
    learned = sum(min(tokens, LEARNING_TOKENS) for tokens in taught) if settings.steps else 0
    projected = sum(reader.query_heads * reader.value_dim * hidden for reader in readers)
    return 4 * (sum(judged) * read + learned * width + projected)


Samples = dict[int, list[QuerySample]]
"""Layer that owns a cache -> samples of all layers that read it."""


@torch.no_grad()
def sample_queries(
    model: PreTrainedModel,
    geometry: Geometry,
    rows: Iterable[torch.Tensor],
    cache: Cache,
    queries: int,
    layers: set[int],
    projections: Mapping[int, torch.Tensor | None],
) -> Samples:
    """Run texts `[T]` and keep `queries` queries of each, drawn past the windows, in the layers
    that own or read the caches of `layers`."""
    owners = {layer.index: layer.owner for layer in geometry if layer.owner in layers}
    taken: dict[int, list[QuerySample]] = {layer: [] for layer in layers}
    for number, row in enumerate(rows):
        past = range(cache.first_quantized, len(row))
        chosen = _draw(number, past, queries)
        if not chosen:
            continue
        at = torch.tensor(chosen)

        def keep(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attend: Attention,
            at: torch.Tensor = at,
            text: int = number,
        ) -> torch.Tensor:
            if layer in owners:
                here = at.to(query.device)
                mask = as_additive(two_copy_mask(attend, query, cache)[:, :, here], torch.float32)
                length = key.shape[2]
                whole = torch.maximum(mask[..., :length], mask[..., length:])
                some, keys, values = query[:, :, here].float(), key.float(), value.float()
                exact = replace(attend, mask=whole).weights(some, keys)
                reading = replace(attend, mask=mask)
                sample = QuerySample(
                    reading, some, keys, values, exact, text, projections.get(layer)
                )
                taken[owners[layer]].append(sample)
            return attend(query, key, value)

        with intercept(model, keep):
            decoder(model)(input_ids=row[None].to(input_device(model)), use_cache=False)
    return taken


@torch.no_grad()
def stored_rows(
    model: PreTrainedModel, rows: Sequence[torch.Tensor], sink: int, layers: set[int], count: int
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[H, N, D]`, float32, of at most `count` tokens of each text `[T]`, drawn
    past its first `sink`."""
    drawn = [
        torch.tensor(_draw(number, range(sink, len(row)), count)) for number, row in enumerate(rows)
    ]
    total, start = sum(map(len, drawn)), 0
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for row, at in zip(rows, drawn, strict=True):
        here = slice(start, start := start + len(at))

        def keep(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            _: Any,
            at: Any = at,
            here: slice = here,
        ) -> None:
            if layer not in layers:
                return
            if layer not in found:
                # In one piece from the start: pieces kept between what a forward pass frees would
                # hold twice the memory.
                found[layer] = _room(key, total), _room(value, total)
            for kept, tensor in zip(found[layer], (key, value), strict=True):
                kept[:, here] = tensor[0][:, at.to(tensor.device)]

        with capture(model, keep):
            decoder(model)(input_ids=row[None].to(input_device(model)), use_cache=False)
    return found


def _room(like: torch.Tensor, count: int) -> torch.Tensor:
    """`[H, N, D]` float32 for rows of `[1, H, T, D]`."""
    return torch.empty(like.shape[1], count, like.shape[3], device=like.device)
