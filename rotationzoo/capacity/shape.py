"""The shape of a model as capacity planning sees it: what each layer caches, and what its weights
are made of. It is read from the model itself, built from its config without weights.
"""

from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from rotationzoo.errors import UnsupportedModel
from rotationzoo.geometry import cached_layers
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.source import Source


@dataclass(frozen=True)
class CachedLayer:
    """One layer that stores keys and values of its own, or latents, which have one KV head. Layers
    that read another layer's cache, and layers without attention, have none."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """How many tokens a layer with sliding attention keeps; None keeps all."""
    rope_dim: int | None = None
    """Elements of the key beside a latent, which stays exact; None for keys and values of heads."""

    @property
    def elements(self) -> int:
        """Cached elements per token."""
        return self.rounded + (self.rope_dim or 0)

    @property
    def rounded(self) -> int:
        """Those that a quantized cache rounds."""
        dims = self.key_dim if self.rope_dim is not None else self.key_dim + self.value_dim
        return self.kv_heads * dims

    @property
    def rows(self) -> int:
        """The rows per token of these, each with its own scale and offset."""
        return self.kv_heads * (2 if self.rope_dim is None else 1)

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
        dims = layer.key_dim, layer.value_dim
        layers.append(CachedLayer(layer.kv_heads, *dims, window, layer.rope_dim))
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
