"""Samples that a search takes from forward passes: queries to score on, and keys and values to
learn from."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.masks import mask_of_queries
from rotationzoo.calibration.search.draws import (
    Draw,
    SamplingSettings,
    batch_draws,
    draw_queries,
    draw_rows,
)
from rotationzoo.calibration.search.early_stop import run_decoder_until_stopped, stop_pass
from rotationzoo.calibration.search.shelf import Buffer, Shelf
from rotationzoo.calibration.search.stored import LayerSamples, Samples, StoredSample
from rotationzoo.model.capture import Attention, intercept
from rotationzoo.model.geometry import Geometry, Layer
from rotationzoo.progress import Progress, silent


@torch.no_grad()
def take_samples(
    model: PreTrainedModel,
    geometry: Geometry,
    layers: Sequence[Layer],
    settings: SamplingSettings,
    shelf: Shelf,
    progress: Progress = silent,
) -> Samples:
    """Sample the first of some `layers`, as many as fit the shelf but at least one, in one pass of
    the texts through the model. The pass ends at the last layer that is sampled.

    The draws depend on the text's number alone. Neither other layers nor the batch change them.
    """
    collector = _Collector(geometry, layers, settings, shelf)
    batches = batch_draws(settings, collector.learned, collector.queried)
    progress("sampling", 0, len(batches))
    for number, batch in enumerate(batches):
        collector.begin(batch)
        with intercept(model, collector):
            run_decoder_until_stopped(model, torch.stack([draw.ids for draw in batch]))
        progress("sampling", number + 1, len(batches))
    for samples in collector.samples.values():
        samples.queries.sort(key=lambda sample: (sample.text, sample.layer))
    return collector.samples


class _Collector:
    """Stands in for the attention of every layer: it stores what is sampled, and lets the model go
    on to the last layer that is wanted."""

    def __init__(
        self, geometry: Geometry, layers: Sequence[Layer], settings: SamplingSettings, shelf: Shelf
    ):
        self.settings, self.shelf = settings, shelf
        wanted = {layer.index for layer in layers}
        self.readers = {layer.index: layer for layer in geometry if layer.owner in wanted}
        self.samples: Samples = {}
        self.queried = draw_queries(settings)
        self.learned = draw_rows(settings)
        self.batch: list[Draw] = []
        self._full = False
        self._buffers: dict[int, Buffer] = {}
        self._masks: dict[tuple[int, int, torch.device], tuple[object, torch.Tensor]] = {}

    def begin(self, batch: list[Draw]) -> None:
        """Take note of the texts of the next pass."""
        self.batch = batch
        self._masks.clear()

    def __call__(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Attention,
    ) -> torch.Tensor:
        layer = self.readers.get(index)
        if layer is not None and self._admit(layer, key):
            for number, draw in enumerate(self.batch):
                parts = query[number], key[number], value[number]
                if draw.start is None:
                    self._store_queries(layer, draw, parts, (attend, number))
                elif layer.owner == index:
                    self._store_rows(layer, draw, parts[1:])
        if index >= self._last:
            stop_pass(attend.module)
        return attend(query, key, value)

    @property
    def _last(self) -> int:
        """The last layer that is needed, as far as it is known by now."""
        readers = list(self.readers.values())
        if self._full:
            readers = [layer for layer in readers if layer.owner in self.samples]
        return max(layer.index for layer in readers)

    def _admit(self, layer: Layer, key: torch.Tensor) -> bool:
        """Whether a layer is sampled. The first pass decides it, and allocates its memory.

        All of it is allocated at once. Small pieces kept in between the blocks that a forward pass
        frees would take twice the memory.
        """
        if layer.owner in self.samples:
            return True
        if self._full or layer.owner != layer.index:
            return False
        must = not self.samples
        buffer = self.shelf.allocate(self._count_elements(layer), key.dtype, key.device, must)
        if buffer is None:
            self._full = True
            return False
        self._buffers[layer.index] = buffer
        samples = self.samples[layer.index] = LayerSamples(key.device)
        if self.learned:
            shape = sum(len(draw.positions) for draw in self.learned), layer.kv_heads
            keys = buffer.take((*shape, layer.key_dim))
            samples.rows = keys, buffer.take((*shape, layer.value_dim))
        return True

    def _count_elements(self, owner: Layer) -> int:
        """The numbers in all samples of the layer that owns a cache."""
        width = owner.kv_heads * (owner.key_dim + owner.value_dim)
        elements = width * sum(len(draw.positions) for draw in self.learned)
        for reader in self.readers.values():
            if reader.owner == owner.index:
                query = reader.query_heads * reader.key_dim
                for draw in self.queried:
                    elements += query * len(draw.positions) + width * len(draw.ids)
        return elements

    def _store_rows(self, layer: Layer, draw: Draw, parts: Sequence[torch.Tensor]) -> None:
        """Copy keys and values `[H, T, D]` at the drawn positions."""
        rows = self.samples[layer.index].rows
        assert rows is not None
        assert draw.start is not None
        place = slice(draw.start, draw.start + len(draw.positions))
        for kept, part in zip(rows, parts, strict=True):
            drawn = part[:, draw.positions.to(part.device)].transpose(0, 1).contiguous()
            kept[place].copy_(drawn, non_blocking=True)

    def _store_queries(
        self, layer: Layer, draw: Draw, parts: Sequence[torch.Tensor], call: tuple[Attention, int]
    ) -> None:
        """Copy the drawn queries `[H, T, D]` of a text, and all that they read; `call` is the
        attention call, and the number of the text in its batch."""
        query, key, value = parts
        sampled = query[:, draw.positions.to(query.device)]
        buffer = self._buffers[layer.owner]

        def keep(part: torch.Tensor) -> torch.Tensor:
            kept = buffer.take((1, *part.shape))
            return kept.copy_(part[None].contiguous(), non_blocking=True)

        sample = StoredSample(
            attend=replace(call[0], mask=None),
            query=keep(sampled),
            key=keep(key),
            value=keep(value),
            mask=self._two_copy_mask(*call, draw, key),
            text=draw.number,
            layer=layer.index,
        )
        self.samples[layer.owner].queries.append(sample)

    def _two_copy_mask(
        self, attend: Attention, number: int, draw: Draw, key: torch.Tensor
    ) -> torch.Tensor:
        """The mask `[1, 1, Q, 2T]` of the drawn queries, float32 and additive: one for all layers
        that the model gives the same mask."""
        place = id(attend.mask), draw.number, key.device
        if place not in self._masks:
            positions, length = draw.positions.to(key.device), key.shape[1]
            mask = mask_of_queries(attend, positions, length)
            if len(mask) > 1:
                mask = mask[number : number + 1]
            exact = self.settings.cache.exact_for(positions, length)
            hidden = torch.finfo(torch.float32).min
            copies = mask.masked_fill(~exact, hidden), mask.masked_fill(exact, hidden)
            # The model's mask is kept, so that no other one gets its id.
            self._masks[place] = attend.mask, torch.cat(copies, dim=-1)
        return self._masks[place][1]
