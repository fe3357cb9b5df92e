"""Samples that a search takes from forward passes: queries to score on, and keys and values to
learn from."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.masks import as_additive, two_copy_mask
from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.search.query_samples import QuerySample
from rotationzoo.model.capture import Attention, capture, decoder, intercept
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.loading import input_device

LEARNING_TOKENS = 2048  # tokens per text whose keys and values are learned from

Samples = dict[int, list[QuerySample]]
"""Layer that owns a cache -> query samples of all layers that read it."""
Rows = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer that owns a cache -> its keys and values `[H, N, D]`, float32."""


@torch.no_grad()
def sample_queries(
    model: PreTrainedModel,
    geometry: Geometry,
    texts: Iterable[torch.Tensor],
    cache: Cache,
    queries: int,
    projections: Mapping[int, torch.Tensor | None],
) -> Samples:
    """Run texts `[T]` through the model and sample some queries of each, with everything that they
    read.

    - `cache`: which positions are exact. Queries are drawn from those that read quantized
      positions.
    - `queries`: the most queries to sample per text. A text too short to have any is skipped.
    - `projections`: the layers to sample, with the output projection of each.
    """
    owners = {layer.index: layer.owner for layer in geometry if layer.index in projections}
    samples: Samples = {owner: [] for owner in owners.values()}
    for number, text in enumerate(texts):
        positions = _draw(number, range(cache.first_quantized, len(text)), queries)
        if not len(positions):
            continue
        sampler = _QuerySampler(samples, owners, cache, projections, positions, number)
        with intercept(model, sampler):
            decoder(model)(input_ids=text[None].to(input_device(model)), use_cache=False)
    return samples


class _QuerySampler:
    """Adds the inputs of each attention call on one text to `samples`, and lets the model
    continue."""

    def __init__(
        self,
        samples: Samples,
        owners: Mapping[int, int],
        cache: Cache,
        projections: Mapping[int, torch.Tensor | None],
        positions: torch.Tensor,
        text: int,
    ):
        self.samples, self.owners, self.projections = samples, owners, projections
        self.cache, self.positions, self.text = cache, positions, text

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Attention,
    ) -> torch.Tensor:
        if layer in self.owners:
            positions = self.positions.to(query.device)
            whole_mask = two_copy_mask(attend, query, self.cache)
            mask = as_additive(whole_mask[:, :, positions], torch.float32)
            length = key.shape[2]
            # The mask of exact attention: a query sees a position if it sees either copy.
            exact_mask = torch.maximum(mask[..., :length], mask[..., length:])
            sampled, keys, values = query[:, :, positions].float(), key.float(), value.float()
            exact = replace(attend, mask=exact_mask).weights(sampled, keys)
            sample = QuerySample(
                attend=replace(attend, mask=mask),
                query=sampled,
                key=keys,
                value=values,
                exact=exact,
                text=self.text,
                projection=self.projections[layer],
            )
            self.samples[self.owners[layer]].append(sample)
        return attend(query, key, value)


@torch.no_grad()
def sample_rows(
    model: PreTrainedModel,
    texts: Sequence[torch.Tensor],
    sink: int,
    layers: set[int],
    count: int = LEARNING_TOKENS,
) -> Rows:
    """Sample keys and values of at most `count` tokens from each text `[T]`.

    Tokens are drawn past the first `sink`, which no cache quantizes.
    """
    drawn = [_draw(number, range(sink, len(text)), count) for number, text in enumerate(texts)]
    collector = _RowCollector(layers, total=sum(map(len, drawn)))
    for text, positions in zip(texts, drawn, strict=True):
        collector.positions = positions
        with capture(model, collector):
            decoder(model)(input_ids=text[None].to(input_device(model)), use_cache=False)
        collector.start += len(positions)
    return collector.rows


class _RowCollector:
    """Copies the keys and values at `positions` of each text into its rows, from row `start` on."""

    def __init__(self, layers: set[int], total: int):
        self.layers, self.total = layers, total
        self.rows: Rows = {}
        self.start = 0
        self.positions = torch.empty(0, dtype=torch.long)

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        if layer not in self.layers:
            return
        if layer not in self.rows:
            # Allocate all rows at once. Small pieces kept in between the blocks that a forward pass
            # frees would take twice the memory.
            self.rows[layer] = self._allocate(key), self._allocate(value)
        place = slice(self.start, self.start + len(self.positions))
        for rows, tensor in zip(self.rows[layer], (key, value), strict=True):
            rows[:, place] = tensor[0][:, self.positions.to(tensor.device)]

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        """An empty float32 tensor `[H, N, D]` for rows of `[1, H, T, D]`."""
        return torch.empty(like.shape[1], self.total, like.shape[3], device=like.device)


def _draw(text: int, positions: range, count: int) -> torch.Tensor:
    """Draw at most `count` of the positions, sorted; the draw is the same in every run."""
    # Python's generator draws the same positions on every device and with every version of torch.
    generator = random.Random(f"0 {text}")
    drawn = generator.sample(positions, min(count, len(positions)))
    return torch.tensor(sorted(drawn), dtype=torch.long)
