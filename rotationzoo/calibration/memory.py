"""What a calibration needs of memory and disk, counted from the shapes of the model and the lengths
of the text.

Each term is that of the tensors which are there at once; `tests/test_memory.py` holds them against
what is allocated.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.search.clip import POSITIONS
from rotationzoo.calibration.search.closed_forms import count as count_candidates
from rotationzoo.calibration.search.layer import BATCH
from rotationzoo.calibration.search.learn import TOKENS
from rotationzoo.calibration.search.samples import LEARNING_TOKENS, SAMPLE_BYTES, size_of
from rotationzoo.model.geometry import Geometry, Layer, cached_layers
from rotationzoo.recipe import SELF, Recipe, Search

# Of samples kept on a CPU, whose allocator leaves holes between them: 6.7 GB measured for 3.7 GB.
_HEAP = 1.75
# torch and transformers themselves, whose memory counts on a CPU: 420 to 460 MB measured
_LIBRARIES = 450_000_000
_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_STEP = 9  # tensors as large as the rotated rows of a step of learning that are there at once
_ROUND_TRIP = 7.5  # the same of rows that go through the codec and are read again
_SOFTMAX = 5.5  # the same of two float32 softmaxes and their divergence


def present(on_cpu: bool, spread: bool) -> int:
    """Bytes of memory that this machine has where a job runs: main memory, the GPU's, or all of
    both where weights are spread. In a container its own limit counts."""
    main = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such limit, or the word "max"
        main = min(main, int(_CONTAINER.read_text()))
    if not torch.cuda.is_available() or (on_cpu and not spread):
        return main
    sizes = [
        torch.cuda.get_device_properties(device).total_memory
        for device in range(torch.cuda.device_count())
    ]
    return main + sum(sizes) if spread else sizes[torch.cuda.current_device()]


@dataclass(frozen=True)
class Footprint:
    """One job's sizes in bytes, estimated. `item` is the size of an activation, `batch` rows of a
    forward pass."""

    recipe: Recipe
    geometry: Geometry
    config: PretrainedConfig
    batch: int
    item: int
    on_cpu: bool

    @property
    def statistics(self) -> int:
        """Four second moments a layer, five with key energy, in float64."""
        if not self.recipe.needs_statistics:
            return 0
        energy = 1 if self.recipe.value_statistic == "key_energy" else 0
        layers = cached_layers(self.geometry)
        return sum(
            8 * layer.kv_heads * (2 * layer.key_dim**2 + (2 + energy) * layer.value_dim**2)
            for layer in layers
        )

    @property
    def rotations(self) -> int:
        layers = cached_layers(self.geometry)
        heads = (1 if self.recipe.pooling == "layer" else layer.kv_heads for layer in layers)
        return sum(
            4 * h * (layer.key_dim**2 + layer.value_dim**2)
            for h, layer in zip(heads, layers, strict=True)
        )

    def peak(self, weights: int) -> int:
        """The most that is there at once, with `weights` bytes of the model."""
        libraries = _LIBRARIES if self.on_cpu else 0
        if not self.recipe.needs_statistics:
            return self.rotations + libraries
        # Sums, and what is written of them; rotations before the search and after.
        kept = weights + 2 * self.statistics + (2 if self.recipe.search else 1) * self.rotations
        passes = max(self.activations(self.batch), self.written_cache)
        # A CPU's allocator keeps what the passes gave back, in pieces that a search has little use
        # for.
        working = passes + self.search if self.on_cpu else max(passes, self.search)
        return kept + libraries + working

    def activations(self, batch: int) -> int:
        """What one batch of the decoder holds at its widest: the residual stream, one layer's
        projections, the float64 copy of one row and, under eager attention, the scores."""
        length, tokens = self.recipe.data.length, self.recipe.data.length * batch
        widest = max(
            (layer.query_heads * (layer.key_dim + layer.value_dim) for layer in self.geometry),
            default=0,
        )
        inner = getattr(self._text, "intermediate_size", None) or 4 * self._text.hidden_size
        projections = (
            3 * tokens * self.item * max(widest, inner if isinstance(inner, int) else max(inner))
        )
        heads = max((layer.query_heads for layer in self.geometry), default=0)
        scores = (
            3 * 4 * tokens * length * heads if self._text._attn_implementation == "eager" else 0
        )
        return (
            4 * tokens * self._text.hidden_size * self.item
            + projections
            + 2 * 8 * length * widest
            + scores
        )

    @property
    def written_cache(self) -> int:
        """The key/value cache of a batch that the model writes."""
        if self.recipe.data.source != SELF:
            return 0
        width = sum(
            layer.kv_heads * (layer.key_dim + layer.value_dim)
            for layer in cached_layers(self.geometry)
        )
        return self.batch * self.recipe.data.length * width * self.item

    @property
    def search(self) -> int:
        """The samples of a group of layers, with the pass that takes them or what is tried on them;
        or the passes of the whole model that choose its clip ratios, when the samples are gone."""
        settings = self.recipe.search
        if settings is None:
            return 0
        judged, taught = self._rows(settings)
        layers = cached_layers(self.geometry)
        sizes = [
            size_of(self.geometry, layer, settings, judged, taught, self._text.hidden_size)
            for layer in layers
        ]
        held = max(max(sizes, default=0), min(SAMPLE_BYTES, sum(sizes)))
        held = int(_HEAP * held) if self.on_cpu else held
        tried = max((self.trying(layer) for layer in layers), default=0)
        return max(held + max(self.activations(1), tried), self.trimming)

    def trying(self, layer: Layer) -> int:
        """What it takes to score and to learn the rotations of one layer, beside its samples."""
        settings = self.recipe.search
        assert settings is not None
        judged, taught = self._rows(settings)
        heads = max(reader.query_heads for reader in self.geometry if reader.owner == layer.index)
        longest, width = max(judged, default=0), max(layer.key_dim, layer.value_dim)
        rows = (
            4 * BATCH * layer.kv_heads * longest * width
        )  # as they come back from each cache tried at once
        attention = 4 * BATCH * heads * settings.queries * longest
        own = (
            4 * heads * settings.queries * sum(judged)
        )  # attention over the recipe's own keys, of all texts
        matrices = (8 + 4) * count_candidates(width) * layer.kv_heads * width**2
        # Eager attention repeats both copies of the keys for each query head, and adds a mask to
        # scores of both.
        keys = 3 * rows + 2 * rows * (heads // layer.kv_heads) + 2 * 2 * attention + own + matrices
        values = int(_ROUND_TRIP * rows) + 2 * own + matrices
        metric = 8 * heads * layer.value_dim * self._text.hidden_size if self.on_cpu else 0
        return max(keys, values, metric, self._learning(layer, settings, taught))

    def _learning(self, layer: Layer, settings: Search, taught: Sequence[int]) -> int:
        if not settings.steps:
            return 0
        width = max(layer.key_dim, layer.value_dim)
        texts = (
            4 * layer.kv_heads * width * sum(min(tokens, LEARNING_TOKENS) for tokens in taught)
        )  # of one side
        step = 4 * settings.starts * layer.kv_heads * TOKENS * width
        # Rows without their mean; beside them their energy in the metric, or a step with its
        # gradient.
        return max(3 * texts, texts + _STEP * step)

    @property
    def trimming(self) -> int:
        """Predictions of the exact model and of one that reads a cache, at all positions of a text
        that read it."""
        settings = self.recipe.search
        assert settings is not None
        longest = max(self._rows(settings)[0], default=0)
        cache = Cache(sink=self.recipe.sink, recent=self.recipe.recent)
        kept = max(0, longest - cache.first_quantized)
        compared = int(_SOFTMAX * 4 * min(POSITIONS, kept) * self._text.vocab_size)
        return 2 * kept * self._text.vocab_size * self.item + max(compared, self.activations(1))

    def _rows(self, settings: Search) -> tuple[list[int], list[int]]:
        """Tokens of the texts that choices are judged on, and of those that are learned from."""
        lengths = (
            self.recipe.data.row_lengths
        )  # of documents, whose lengths nobody knows before they are read, an upper limit
        fitted = len(lengths) - settings.held_out(len(lengths))
        return lengths[fitted:], lengths[:fitted]

    @property
    def _text(self) -> PretrainedConfig:
        return self.config.get_text_config(decoder=True)
