"""Estimates the memory that a search needs, from the model's shapes and the lengths of the texts.

Each term counts tensors that exist at the same time. The tests compare the terms with what is
really allocated.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.search.closed_forms import count_closed_forms
from rotationzoo.calibration.search.layer import BATCH
from rotationzoo.calibration.search.learn import TOKENS
from rotationzoo.calibration.search.model_divergence import POSITIONS
from rotationzoo.calibration.search.sampling import LEARNING_TOKENS
from rotationzoo.model.geometry import Geometry, Layer, cached_layers
from rotationzoo.recipe import Recipe, Search

SAMPLE_BYTES = 4_000_000_000
"""Bytes of samples kept at a time. As many layers are searched together as fit, but at least
one."""
# A CPU's allocator leaves holes between samples: 6.7 GB were measured for 3.7 GB of them.
_HEAP = 1.75
_STEP = 9  # simultaneous tensors as large as the rotated rows of a learning step
_ROUND_TRIP = 7.5  # the same, for rows that pass the codec and are read again
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


def sample_bytes(
    geometry: Geometry, layer: Layer, settings: Search, lengths: TextLengths, hidden: int
) -> int:
    """Bytes of all samples of one layer's cache, in float32.

    - From each held-out text: keys, values, attention and mask, for every layer that reads the
      cache.
    - From each fitted text: keys and values to learn from.
    - The output projections of the layers that read the cache; `hidden` is the width of the
      residual stream.
    """
    width = layer.kv_heads * (layer.key_dim + layer.value_dim)
    readers = [reader for reader in geometry if reader.owner == layer.index]
    by_token = sum(width + settings.queries * (reader.query_heads + 2) for reader in readers)
    learning_tokens = _learning_tokens(lengths) if settings.steps else 0
    projections = sum(reader.query_heads * reader.value_dim * hidden for reader in readers)
    return 4 * (sum(lengths.held_out) * by_token + learning_tokens * width + projections)


def _learning_tokens(lengths: TextLengths) -> int:
    return sum(min(tokens, LEARNING_TOKENS) for tokens in lengths.fitted)


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
    """Bytes that a forward pass over one row takes."""
    on_cpu: bool

    @property
    def lengths(self) -> TextLengths:
        """The lengths of the texts that the recipe asks for."""
        return TextLengths.from_recipe(self.recipe, self.settings)

    @property
    def peak(self) -> int:
        """Peak memory of the search.

        It is reached either with the samples of a group of layers, during the forward pass that
        takes them or while candidates are scored on them; or after the samples are freed, while the
        clip ratios are chosen by passes through the whole model.
        """
        lengths, hidden = self.lengths, self.config.hidden_size
        layers = cached_layers(self.geometry)
        sizes = [
            sample_bytes(self.geometry, layer, self.settings, lengths, hidden) for layer in layers
        ]
        samples = max(max(sizes, default=0), min(SAMPLE_BYTES, sum(sizes)))
        if self.on_cpu:
            samples = int(_HEAP * samples)
        layer_search = max((self.layer_search(layer) for layer in layers), default=0)
        return max(samples + max(self.forward, layer_search), self.clip_search)

    def layer_search(self, layer: Layer) -> int:
        """Peak memory to score and learn the rotations of one layer, beside its samples."""
        lengths, settings = self.lengths, self.settings
        heads = max(reader.query_heads for reader in self.geometry if reader.owner == layer.index)
        longest, width = max(lengths.held_out, default=0), max(layer.key_dim, layer.value_dim)
        # Rows as the caches of one batch of candidates return them.
        rows = 4 * BATCH * layer.kv_heads * longest * width
        attention = 4 * BATCH * heads * settings.queries * longest
        # The attention over the baseline's keys, for all texts.
        baseline = 4 * heads * settings.queries * sum(lengths.held_out)
        matrices = (8 + 4) * count_closed_forms(width) * layer.kv_heads * width**2
        # Eager attention repeats both copies of the keys for each query head, and adds a mask to
        # the scores of both.
        repeated = 2 * rows * (heads // layer.kv_heads) + 2 * 2 * attention
        keys = 3 * rows + repeated + baseline + matrices
        values = int(_ROUND_TRIP * rows) + 2 * baseline + matrices
        metric = 8 * heads * layer.value_dim * self.config.hidden_size if self.on_cpu else 0
        return max(keys, values, metric, self.learning(layer))

    def learning(self, layer: Layer) -> int:
        """Peak memory to learn the rotations of one side of a layer."""
        if not self.settings.steps:
            return 0
        width = max(layer.key_dim, layer.value_dim)
        rows = 4 * layer.kv_heads * width * _learning_tokens(self.lengths)
        step = 4 * self.settings.starts * layer.kv_heads * TOKENS * width
        # The centred rows, and beside them either their energy in the metric or one step with its
        # gradient.
        return max(3 * rows, rows + _STEP * step)

    @property
    def clip_search(self) -> int:
        """Peak memory of the search for clip ratios.

        It holds the logits of the exact model and of one that reads a 2-bit cache, at all positions
        of a text that read quantized tokens.
        """
        longest = max(self.lengths.held_out, default=0)
        cache = Cache(sink=self.recipe.sink, recent=self.recipe.recent)
        predicted = max(0, longest - cache.first_quantized)
        vocabulary: int = self.config.vocab_size
        compared = int(_SOFTMAX * 4 * min(POSITIONS, predicted) * vocabulary)
        return 2 * predicted * vocabulary * self.item + max(compared, self.forward)
