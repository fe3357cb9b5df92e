"""The attention geometry of a model: which layers store keys and values, with what heads and
dimensions, and which quantization groups divide these."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rotationzoo.errors import RotationZooError
from rotationzoo.sides import HEADS, LATENTS, CachedRows, rows_of


@dataclass(frozen=True)
class Layer:
    """The attention of one layer. `owner` is the layer whose cache it reads: itself or an earlier
    one. A layer with latents has one KV head, whose key and value are both the latent."""

    index: int
    owner: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    shift_invariant: bool | None = None
    """Whether attention stays the same if a mean is subtracted from all keys. None if this was not
    tested: for files imported without a model, and for sides that keep their mean."""
    rope_dim: int | None = None
    """Elements of the RoPE key that is cached next to a latent. None without latents."""

    @property
    def cached(self) -> CachedRows:
        """The rows that it caches."""
        return HEADS if self.rope_dim is None else LATENTS

    @property
    def sides(self) -> tuple[str, ...]:
        """The rows that are rotated."""
        return self.cached.sides

    @property
    def dims(self) -> dict[str, int]:
        """The dimensions of a head's queries, attention outputs, and sides."""
        dims = self.key_dim, self.value_dim
        stored = zip(self.sides, dims, strict=False)  # both are equal for a single side
        return {"query": self.key_dim, "output": self.value_dim, **dict(stored)}

    @property
    def exact_elements(self) -> int:
        """Elements per token that are cached next to the sides and stay exact."""
        return self.rope_dim or 0

    @property
    def elements(self) -> int:
        """Elements per token that are cached."""
        dims = self.dims
        return self.kv_heads * sum(dims[side] for side in self.sides) + self.exact_elements

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads


Geometry = list[Layer]


def cached_layers(geometry: Geometry) -> Geometry:
    """The layers that store their own keys and values, and so get a rotation."""
    return [layer for layer in geometry if layer.owner == layer.index]


def cached_rows(geometry: Geometry) -> CachedRows:
    """What a model caches."""
    return rows_of({side for layer in geometry for side in layer.sides})


def shifted_layers(geometry: Geometry) -> list[int]:
    """The layers whose attention changes when a mean is subtracted from all keys."""
    return [layer.index for layer in geometry if layer.shift_invariant is False]


def shift_reason(layers: Sequence[int]) -> str:
    """Why keys must keep their mean, from the `shifted_layers`."""
    where = f"layer {layers[0]}"
    if len(layers) > 1:
        where = f"{len(layers)} layers, {layers[0]} the first"
    reason = "attention depends on what all keys share, as with learned sinks or a soft cap"
    return f"{reason} ({where})"


def same_shapes(geometry: Geometry, other: Geometry) -> bool:
    """Whether two geometries have the same layers, heads and dimensions."""
    shapes = [replace(layer, shift_invariant=None) for layer in geometry]
    return shapes == [replace(layer, shift_invariant=None) for layer in other]


def geometry_json(geometry: Geometry) -> list[dict[str, Any]]:
    """The `geometry` of a manifest, without properties that are None."""
    layers = []
    for layer in map(asdict, geometry):
        layers.append({name: value for name, value in layer.items() if value is not None})
    return layers


def geometry_from_json(content: list[dict[str, Any]]) -> Geometry:
    """Inverse of `geometry_json`. Raises `RotationZooError` for anything else."""
    try:
        return [Layer(**layer) for layer in content]
    except TypeError as error:
        raise RotationZooError("the geometry in the manifest is damaged") from error


_SMALLEST = 4  # channels: the codes of a byte, and what the kernels take


def check_group_size(group_size: int | None, dims: Collection[int]) -> None:
    """Raise `RotationZooError`, with sizes that work, unless groups divide these dimensions."""
    if group_size is None or all(dim % group_size == 0 for dim in dims):
        return
    common = math.gcd(*dims)
    smaller = [str(size) for size in range(_SMALLEST, common, 4) if common % size == 0]
    heads = " and ".join(map(str, sorted(dims)))
    raise RotationZooError(
        f"groups of {group_size} channels do not divide heads of {heads} channels, but groups of "
        f"{', '.join([*smaller, str(common)])} do",
        hint="give one of these as the group size, or none for the whole head",
    )


def head_dims(geometry: Geometry) -> set[int]:
    """The dimensions of all cached keys and values."""
    return {dim for layer in cached_layers(geometry) for dim in (layer.key_dim, layer.value_dim)}


def full_attention_layers(config: Any) -> set[int] | None:
    """The layers with full attention and a cache, if the config gives others a sliding window; None
    if no layer has one."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:  # all layers are the same
        return None if getattr(text, "sliding_window", None) is None else set()
    # `reference_sliding_attention` reads all of a prompt, and forgets only new tokens.
    if not {"sliding_attention", "hybrid_sliding"}.intersection(kinds):
        return None
    owners = len(kinds) - (getattr(text, "num_kv_shared_layers", None) or 0)
    return {index for index in range(owners) if kinds[index] in ("full_attention", "hybrid")}


def shares_blocks(config: Any) -> bool:
    """Whether the model has layers for which vLLM pads blocks to the same bytes as for full
    attention: with a sliding window, or states of linear attention, Mamba or a convolution."""
    states = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return full_attention_layers(config) is not None or not states.isdisjoint(kinds)
