"""The moment of queries weighted by how peaked their attention is, in whose metric error feedback
chooses the codes of keys."""

from dataclasses import replace

import torch

from rotationzoo.cache.masks import mask_of_queries
from rotationzoo.calibration.observers import add_rows
from rotationzoo.errors import UnsupportedModel
from rotationzoo.linalg.moments import PEAKED, Statistics
from rotationzoo.model.capture import Attention
from rotationzoo.model.geometry import Geometry, Layer

SAMPLED_QUERIES = 256
"""The most queries of a row that are weighted. Every 8th of 2,048 gave the same as all of them: a
mean loss of answers of .085 beside .088 on eight models."""
EVERY_QUERY = 1e-9
"""What every sampled query counts for at least, so that heads that read exact tokens alone have a
metric too: that of all their queries alike."""
# One tensor of scores of a block of queries. Attention has two of them at a time, with sinks three.
_SCORES_BYTES, _COPIES = 256_000_000, 3


class PeakedQueryObserver:
    """Sums second moments of sampled queries, weighted by `peakedness`, for the layer that owns the
    cache which they read. An `Intercept` that leaves what the model computes as it is.

    `windows` are the first and the last tokens that stay exact while decoding, `(sink, recent)`.
    """

    kinds = (PEAKED,)

    def __init__(self, geometry: Geometry, statistics: Statistics, windows: tuple[int, int]):
        self.layers = {layer.index: layer for layer in geometry}
        self.statistics = statistics
        self.windows = windows

    def __call__(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Attention,
    ) -> torch.Tensor:
        # An unknown layer is refused by `MomentObserver`, which sees the same call.
        if index in self.layers:
            self._add(self.layers[index], query, key, attend)
        return attend(query, key, value)

    def _add(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, attend: Attention) -> None:
        batch, heads, length, _ = query.shape
        positions = sampled_positions(length).to(query.device)
        for at in positions.split(block_size(batch * heads, length)):
            sampled = query[:, :, at]
            weights = peakedness(softmax_of(sampled, key, at, attend), at, self.windows)
            add_rows(self.statistics, layer, PEAKED, sampled, weights)


def peakedness(
    softmax: torch.Tensor, positions: torch.Tensor, windows: tuple[int, int]
) -> torch.Tensor:
    """The weights `(sum_k p_k^2)^2` `[B, H_q, Q]`, float64, of queries at these positions, from
    their softmax p `[B, H_q, Q, T]`, which is changed. The sum is over the keys that are quantized
    when the query reads them: behind the sink and before the recent tokens.

    The sum of squares is 1 for a query that reads one key, and 1 / n for one that reads n keys
    alike. That it is squared once more is measured, not derived: see docs/recipes.md. Exact keys
    have no error to make up for. Heads that look at the tokens just before them, or rest on the
    first one, are the most peaked of all, and would outweigh those that look something up.
    """
    sink, recent = windows
    keys = torch.arange(softmax.shape[-1], device=softmax.device)
    exact = (keys < sink) | (keys > positions[:, None] - recent)
    softmax.masked_fill_(exact, 0)
    norm: torch.Tensor = torch.linalg.vector_norm(softmax, dim=-1)  # makes no copy of the scores
    return norm.double().pow(4) + EVERY_QUERY


def softmax_of(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, attend: Attention
) -> torch.Tensor:
    """The softmax `[B, H_q, Q, T]`, float32, of the exact model for queries `[B, H_q, Q, D]` at
    these positions of rows with keys `[B, H_kv, T, D]`. Raises `UnsupportedModel` for a model
    without eager attention, which alone shows it."""
    try:
        mask = mask_of_queries(attend, positions, key.shape[2])
        return replace(attend, mask=mask).weights(query, key)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{error}, and error feedback weights queries by it", hint="add: --no-feedback"
        ) from error


def sampled_positions(length: int) -> torch.Tensor:
    """At most `SAMPLED_QUERIES` evenly spaced positions of a row of `length` tokens.

    Each is the last of its stretch, because the first queries of a row have few keys to read and
    are peaked whatever they look for.
    """
    step = -(-length // SAMPLED_QUERIES)
    return torch.arange(step - 1, length, step)


def block_size(heads: int, length: int) -> int:
    """How many queries of each of `heads` heads are scored at a time against `length` keys."""
    return max(1, _SCORES_BYTES // (4 * heads * length))


def peaked_query_bytes(layer: Layer, batch: int, length: int) -> int:
    """The most memory that the observer takes for one layer: its scores, and the keys in float32,
    once as they are and once for every query head."""
    heads = batch * layer.query_heads
    queries = min(len(sampled_positions(length)), block_size(heads, length))
    scores = _COPIES * 4 * heads * queries * length
    keys = 4 * batch * (layer.kv_heads + layer.query_heads) * length * layer.key_dim
    return scores + keys
