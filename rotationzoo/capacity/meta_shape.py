"""A model's shape from the model itself, built without weights on `meta`: for configs that
`config_shape` does not read."""

from typing import Any

from transformers import DynamicCache

from rotationzoo.capacity.shape import CachedLayer, Shape
from rotationzoo.errors import UnsupportedModel, as_unavailable
from rotationzoo.model import loading
from rotationzoo.model.geometry import cached_layers, geometry_on_meta
from rotationzoo.model.source import Source


def shape_on_meta(source: Source) -> Shape:
    """Build a model from its config, and look at what its attention reads and what transformers'
    cache keeps of it.

    Raises `ModelUnavailable` for a config that cannot be read, and `UnsupportedModel` for a cache
    that does not hold the keys and values of KV heads.
    """
    config = loading.load_config(source)
    model = loading.on_meta(config, source.name)
    with as_unavailable(f"{source.name} fails when it runs"):
        geometry = geometry_on_meta(model)
    if geometry is None:
        raise UnsupportedModel(
            f"what the layers of {source.name} cache shows only with its weights",
            hint="fetch them and look at: rotationzoo generate",
        )
    text: Any = config.get_text_config(decoder=True)
    kept = dict(enumerate(DynamicCache(config=config).layers))
    layers = []
    for layer in cached_layers(geometry):
        window = getattr(kept.get(layer.index), "sliding_window", None)
        layers.append(CachedLayer(layer.kv_heads, layer.key_dim, layer.value_dim, window))
    without = text.num_hidden_layers - len(geometry)
    state = _linear_state(text)
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    routed = [p.numel() for name, p in model.named_parameters() if ".experts." in name]
    return Shape(
        tuple(layers),
        embedding.weight.numel(),
        tied=output is None or output.weight is embedding.weight,
        parameters=model.num_parameters(),
        expert_parameters=sum(routed),
        experts=_experts(text) or 1,
        experts_per_token=getattr(text, "num_experts_per_tok", None) or 1,
        state_bytes=without * state,
        uncounted_states=without > 0 and state == 0,
    )


def parameters_on_meta(source: Source) -> int:
    """Count a model's parameters. Raises as `shape_on_meta`."""
    config = loading.load_config(source)
    return loading.on_meta(config, source.name).num_parameters()


def _experts(text: Any) -> int | None:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if count := getattr(text, name, None):
            return int(count)
    return None


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
