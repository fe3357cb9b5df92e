"""The shape of a model as capacity planning sees it: what each layer caches, and what its weights
are made of. It is read from the model itself, built from its config without weights. From it follow
the bytes of a request's cache, and the longest context within so many bytes.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from rotationzoo.codec.formats import FORMATS, Format
from rotationzoo.errors import UnsupportedModel
from rotationzoo.geometry import Layer, cached_layers
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.source import Source

CACHES = ("bf16", "fp8", "int4", "int2")
_EXACT_BITS = 16
_PLAIN_BITS = {"bf16": 16, "fp8": 8}
_LONGEST = 1 << 31  # tokens; whatever holds so many holds any context


@dataclass(frozen=True)
class CachedLayer:
    """One layer with a cache of its own. Layers that read another layer's cache, and layers without
    attention, have none."""

    layer: Layer
    window: int | None = None
    """How many tokens a layer with sliding attention keeps; None keeps all."""

    @property
    def rows(self) -> int:
        """The rows per token that a quantized cache rounds, each with its own scale and offset."""
        return self.layer.kv_heads * len(self.layer.sides)

    @property
    def rounded(self) -> int:
        """The elements of these: all but the key beside a latent."""
        return self.layer.kv_heads * sum(self.layer.dims[side] for side in self.layer.sides)

    def tokens_held(self, context: int) -> int:
        """How many tokens of a request of `context` tokens the layer keeps."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Shape:
    """A model's cache and weights."""

    layers: tuple[CachedLayer, ...]
    embedding: int
    """Parameters of the input embedding."""
    tied: bool
    """Whether the output projection is the input embedding."""
    parameters: int = 0
    """All parameters."""
    expert_parameters: int = 0
    """Parameters of routed experts, in all layers together."""
    state_bytes: int = 0
    """Bytes per request of linear attention's states, which do not grow with the context."""
    uncounted_states: bool = False
    """Whether layers without keys and values keep states of a size that is not known here, or
    sparse attention the keys of an index."""


def read_shape(source: Source) -> Shape:
    """Build a model from its config on `meta`, and look at what its attention reads and what
    transformers' cache keeps of it.

    Raises `ModelUnavailable` for a config that cannot be read, and `UnsupportedModel` for a cache
    that holds neither the keys and values of KV heads nor latents.
    """
    config = loading.load_config(source)
    model = loading.on_meta(config, source.name)
    text: Any = config.get_text_config(decoder=True)
    layers, without = _cached_layers(source, config, model)
    state = _linear_state(text)
    has_index = any(hasattr(each, "update_indexer") for each in DynamicCache(config=config).layers)
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    routed = [p.numel() for name, p in model.named_parameters() if ".experts." in name]
    return Shape(
        tuple(layers),
        embedding.weight.numel(),
        tied=output is None or output.weight is embedding.weight,
        parameters=model.num_parameters(),
        expert_parameters=sum(routed),
        state_bytes=without * state,
        uncounted_states=has_index or (without > 0 and state == 0),
    )


def _cached_layers(
    source: Source, config: PretrainedConfig, model: PreTrainedModel
) -> tuple[list[CachedLayer], int]:
    """The layers with a cache of their own, and how many layers have no attention."""
    geometry = geometry_on_meta(model)
    if geometry is None:
        raise UnsupportedModel(
            f"what the layers of {source.name} cache shows only with its weights",
            hint="fetch them and look at: rotationzoo generate",
        )
    kept = dict(enumerate(DynamicCache(config=config).layers))
    layers = []
    for layer in cached_layers(geometry):
        window = getattr(kept.get(layer.index), "sliding_window", None)
        layers.append(CachedLayer(layer, window))
    return layers, config.get_text_config(decoder=True).num_hidden_layers - len(geometry)


def _linear_state(text: Any) -> int:
    """Bytes of one layer of gated delta networks: a float32 matrix per value head, and the inputs
    of its convolution in bfloat16. 0 for other kinds of layers."""
    heads = getattr(text, "linear_num_value_heads", None)
    if not heads:
        return 0
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    channels = 2 * text.linear_num_key_heads * key + heads * value
    matrix: int = 4 * heads * key * value
    convolution: int = 2 * channels * (text.linear_conv_kernel_dim - 1)
    return matrix + convolution


@dataclass(frozen=True)
class Storage:
    """How a cache of few bits is stored: the format, whose scales and offsets take bits of their
    own, and the first and last tokens of a request that int2 keeps in bf16."""

    format: Format = FORMATS["sglang"]
    sink: int = 64
    recent: int = 256


def request_bytes(shape: Shape, cache: str, context: int, storage: Storage) -> int:
    """Bytes of the cache of one request of `context` tokens. States of linear attention count in
    every cache.

    * `bf16`, `fp8`: 16 and 8 bits an element, nothing else.
    * `int4`: 4 bits an element; each row of a head, or latent, has a scale and an offset. No token
      is exact, and the key beside a latent is.
    * `int2`: the same with 2 bits, and the exact windows of `storage`.
    """
    if cache in _PLAIN_BITS:
        bits = _PLAIN_BITS[cache] * elements(shape, context)
    else:
        bits = sum(_quantized_bits(layer, cache, context, storage) for layer in shape.layers)
    return bits // 8 + shape.state_bytes


def elements(shape: Shape, context: int) -> int:
    """Cached elements of one request of `context` tokens, without the states of linear
    attention."""
    return sum(each.layer.elements * each.tokens_held(context) for each in shape.layers)


def longest_context(shape: Shape, cache: str, free: int, storage: Storage) -> int | None:
    """The most tokens that one request can have in `free` bytes; None if there is no limit, as
    where every layer slides."""

    def size(context: int) -> int:
        return request_bytes(shape, cache, context, storage)

    too_many = bisect_right(range(_LONGEST + 1), free, key=size)
    return None if too_many > _LONGEST else max(0, too_many - 1)


def _quantized_bits(cached: CachedLayer, cache: str, context: int, storage: Storage) -> int:
    held, elements = cached.tokens_held(context), cached.layer.elements
    beside = cached.rows * 2 * storage.format.metadata_bits
    beside += (elements - cached.rounded) * _EXACT_BITS
    if cache == "int4":
        return held * (4 * cached.rounded + beside)
    # A layer that slides forgets the sink.
    forgotten = context - held
    exact = min(held, max(0, storage.sink - forgotten) + storage.recent)
    return exact * elements * _EXACT_BITS + (held - exact) * (2 * cached.rounded + beside)
