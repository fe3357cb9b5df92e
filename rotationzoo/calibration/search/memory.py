"""Estimates the memory that a search needs, from the model's shapes and the lengths of the texts.

Each term counts tensors that exist at the same time. The tests compare the terms with what is
really allocated.
"""

import math
from dataclasses import dataclass

from transformers import PretrainedConfig

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.search.closed_forms import count_closed_forms
from rotationzoo.calibration.search.draws import LEARNING_TOKENS
from rotationzoo.calibration.search.learn import TOKENS
from rotationzoo.calibration.search.scoring import BATCH
from rotationzoo.calibration.search.shelf import DEVICE_SHARE, HOST_SHARE
from rotationzoo.calibration.search.task import count_testing
from rotationzoo.model.geometry import Geometry, Layer, cached_layers
from rotationzoo.model.prediction import BLOCK_LOGITS
from rotationzoo.recipe import Recipe, Search

_LEARNED_AT_ONCE, _LEARNED_AT_ONCE_ON_CPU = 4_000_000_000, 250_000_000
"""Bytes of learning steps at a time: as many layers are searched side by side as take no more, but
at least one. More would not keep a GPU busier."""
_FILLED = 0.8  # of what is free
# A CPU's allocator leaves holes between samples: 6.7 GB were measured for 3.7 GB of them.
_HEAP = 1.75
_STEP = 9  # simultaneous tensors as large as the rotated rows of a learning step
_ROUND_TRIP = 7.5  # the same, for rows that pass the codec and are read again
_CODEC = 8  # the same, for rows of a simulated cache
_SOFTMAX = 5.5  # the same, for two float32 softmaxes and their divergence


@dataclass(frozen=True)
class TextLengths:
    """The lengths in tokens of held-out texts, which choices are made on, and of fitted texts,
    which are learned from."""

    held_out: list[int]
    fitted: list[int]

    @classmethod
    def from_recipe(cls, recipe: Recipe, settings: Search) -> "TextLengths":
        """The lengths that a recipe asks for.

        They are an upper limit if each row is a document, whose length is unknown until it is read.
        """
        lengths = recipe.data.row_lengths
        fitted = len(lengths) - settings.held_out(len(lengths))
        return cls(held_out=lengths[fitted:], fitted=lengths[:fitted])


@dataclass(frozen=True)
class LayerFootprint:
    """Estimated sizes of the search in single layers, in bytes."""

    geometry: Geometry
    settings: Search
    lengths: TextLengths
    hidden: int
    """The width of the residual stream."""
    on_cpu: bool = False

    def samples(self, layer: Layer, item: int) -> int:
        """All samples of one layer's cache, at `item` bytes a number.

        From each held-out text they are the queries, keys and values of every layer that reads the
        cache; from each fitted text, keys and values to learn from.
        """
        width = layer.kv_heads * (layer.key_dim + layer.value_dim)
        numbers = width * self._learning_tokens
        for reader in self._readers(layer):
            queries = len(self.lengths.held_out) * self.settings.queries
            numbers += sum(self.lengths.held_out) * width
            numbers += queries * reader.query_heads * reader.key_dim
        return item * numbers

    @property
    def masks(self) -> int:
        """The masks of the sampled queries, over both copies of a text, which layers share."""
        return 2 * 4 * self.settings.queries * sum(self.lengths.held_out)

    def searched_at_once(self, layer: Layer, item: int, room: float = math.inf) -> int:
        """How many layers like this one are searched side by side, where `room` bytes are free."""
        budget = _LEARNED_AT_ONCE_ON_CPU if self.on_cpu else _LEARNED_AT_ONCE
        count = budget // max(1, self._learning_step(layer))
        fitting = _FILLED * room / max(1, self.search(layer, 1, item))
        return max(1, int(min(count, fitting)))

    def search(self, layer: Layer, layers: int, item: int) -> int:
        """Peak memory to search some layers like this one side by side, beside their samples. Those
        to learn from are copied from host memory, at `item` bytes a number; 0 where they are on the
        device."""
        width = sum(reader.query_heads * reader.value_dim for reader in self._readers(layer))
        projections = 4 * layers * width * self.hidden
        return projections + max(self.scoring(layer), self.learning(layer, layers, item))

    def scoring(self, layer: Layer) -> int:
        """Peak memory to score the rotations of one layer, beside its samples and projections."""
        readers = self._readers(layer)
        heads = max(reader.query_heads for reader in readers)
        longest, width = max(self.lengths.held_out, default=0), max(layer.key_dim, layer.value_dim)
        # All samples in float32, with the attention over exact keys, its scores, and the attention
        # over quantized keys.
        loaded = self.samples(layer, 4) - 4 * self._learning_tokens * layer.kv_heads * (
            layer.key_dim + layer.value_dim
        )
        attention = 4 * heads * self.settings.queries * sum(self.lengths.held_out) * len(readers)
        # Rows as the caches of one batch of candidates return them, and attention over them.
        rows = 4 * BATCH * layer.kv_heads * longest * width
        attentions = 4 * BATCH * heads * self.settings.queries * longest
        matrices = (8 + 4) * count_closed_forms(width) * layer.kv_heads * width**2
        batch = max(int(_ROUND_TRIP * rows), 2 * rows + 4 * attentions)
        metric = 2 * 8 * layer.value_dim * self.hidden
        return loaded + 3 * attention + matrices + max(batch, metric)

    def learning(self, layer: Layer, layers: int, item: int) -> int:
        """Peak memory to learn one side of some layers like this one, with the rows that come from
        host memory at `item` bytes a number."""
        if not self.settings.steps:
            return 0
        width = max(layer.key_dim, layer.value_dim)
        rows = item * layer.kv_heads * width * self._learning_tokens
        return layers * (rows + self._learning_step(layer))

    def reserve(self, item: int) -> int:
        """Bytes that a device needs for the search beside its samples."""
        layers = cached_layers(self.geometry)
        counts = [self.searched_at_once(layer, item) for layer in layers]
        pairs = zip(layers, counts, strict=True)
        searching = [self.search(layer, count, item) for layer, count in pairs]
        return self.masks + max(searching, default=0)

    @property
    def _learning_tokens(self) -> int:
        if not self.settings.steps:
            return 0
        return sum(min(tokens, LEARNING_TOKENS) for tokens in self.lengths.fitted)

    def _learning_step(self, layer: Layer) -> int:
        """A step of learning one side of a layer, with its gradient."""
        width = max(layer.key_dim, layer.value_dim)
        return _STEP * 4 * self.settings.starts * layer.kv_heads * TOKENS * width

    def _readers(self, layer: Layer) -> list[Layer]:
        return [reader for reader in self.geometry if reader.owner == layer.index]


@dataclass(frozen=True)
class SearchFootprint:
    """Estimated sizes of one job's search, in bytes."""

    recipe: Recipe
    settings: Search
    geometry: Geometry
    config: PretrainedConfig
    """The config of the model's text part."""
    item: int
    """Bytes per activation element."""
    forward: int
    """Bytes that a forward pass over one batch takes."""
    on_cpu: bool
    batch: int = 1
    """Rows per forward pass."""
    free: int = 0
    """Bytes that are free where the search runs, beside the model and its statistics; 0 if nobody
    knows, and then all samples are taken to fit."""

    @property
    def lengths(self) -> TextLengths:
        """The lengths of the texts that the recipe asks for."""
        return TextLengths.from_recipe(self.recipe, self.settings)

    @property
    def layers(self) -> LayerFootprint:
        """The footprint of the search in single layers, which reads the texts that choose."""
        hidden: int = self.config.hidden_size
        held_out = self.lengths.held_out
        choosing = held_out[: len(held_out) - count_testing(len(held_out))]
        lengths = TextLengths(choosing, self.lengths.fitted)
        return LayerFootprint(self.geometry, self.settings, lengths, hidden, self.on_cpu)

    @property
    def peak(self) -> int:
        """Peak memory of the search.

        It is reached either with the samples of a group of layers, during the forward pass that
        takes them or while candidates are scored on them; or after the samples are freed, while the
        clip ratios are chosen by passes through the whole model.
        """
        needs, layers = self.layers, cached_layers(self.geometry)
        every = sum(needs.samples(layer, self.item) for layer in layers)
        # Rows that lie on the device already are not copied.
        item = 0 if self.samples_on_device == every else self.item
        room = self.free - self.samples_on_device if self.free else math.inf
        searching = 0
        for layer in layers:
            count = min(needs.searched_at_once(layer, item, room), len(layers))
            searching = max(searching, needs.search(layer, count, item))
        samples = self.samples_on_device + needs.masks
        kept = 0
        if self.on_cpu:
            samples, kept = int(_HEAP * samples), self.exact_states
        return kept + max(samples + max(self.forward, searching), self.clip_search)

    @property
    def samples_on_device(self) -> int:
        """Bytes of samples that lie where the search runs: those of all layers, or of as many as
        fit. Those of the others lie in host memory, or are taken after them."""
        sizes = [self.layers.samples(layer, self.item) for layer in cached_layers(self.geometry)]
        if not self.free:
            return sum(sizes)
        share = HOST_SHARE if self.on_cpu else DEVICE_SHARE
        reserve = 0 if self.on_cpu else self.layers.reserve(self.item)
        room, held = share * (self.free - reserve), 0
        for size in sizes:
            if held + size > room:
                # A GPU may hold the samples of no layer at all.
                return max(held, sizes[0]) if self.on_cpu else held
            held += size
        return held

    @property
    def exact_states(self) -> int:
        """What the exact model's decoder makes of the held-out texts. It is kept in host memory
        until the search ends."""
        first = Cache(sink=self.recipe.sink, recent=self.recipe.recent).first_quantized
        predicted = sum(max(0, length - first) for length in self.lengths.held_out)
        states: int = predicted * self.config.hidden_size * self.item
        return states

    @property
    def clip_search(self) -> int:
        """Peak memory of the search for clip ratios.

        A batch of texts passes through the model with a simulated cache. Then the logits of the
        exact model and of this one are compared, a block at a time.
        """
        longest = max(self.lengths.held_out, default=0)
        cache = Cache(sink=self.recipe.sink, recent=self.recipe.recent)
        predicted = self.batch * max(0, longest - cache.first_quantized)
        states: int = 2 * predicted * self.config.hidden_size * self.item
        logits = min(BLOCK_LOGITS, predicted * self.config.vocab_size)
        compared: int = int(_SOFTMAX * 4 + 2 * self.item) * logits
        widths = (layer.kv_heads * max(layer.key_dim, layer.value_dim) for layer in self.geometry)
        codec: int = _CODEC * 4 * self.batch * longest * max(widths, default=0)
        return states + max(compared, self.forward + codec)
