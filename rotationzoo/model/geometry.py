"""The attention geometry of a model: which layers store keys and values, with what heads and
dimensions, and which quantization groups divide these.

There is no list of supported models. The model runs on a few tokens, usually on `meta` without
weights, and the inputs of attention are compared with what the cache stores. `geometry_of` refuses
a model family that cannot be calibrated, with the reason in one sentence.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.model.cache_names import returned_cache
from rotationzoo.model.capture import Attention, decoder, intercept
from rotationzoo.model.centering import ignores_shift
from rotationzoo.model.latent import OUTPUT, expand
from rotationzoo.rotations import LATENT, SIDES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 8
CAUSAL_HINT = "give a decoder-only model, such as Qwen/Qwen3-8B, or demo"


@dataclass(frozen=True)
class Layer:
    """The attention of one layer. `owner` is the layer whose cache it reads: itself, or an earlier
    layer whose cache it shares.

    A layer that caches latents has one KV head, whose key and value are both the latent."""

    index: int
    owner: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    shift_invariant: bool | None = None
    """Whether its attention ignores what all keys share, so that subtracting their mean changes
    nothing. None where this was not tried: for files imported without a model, and for latents,
    which are read with their mean."""
    rope_dim: int | None = None
    """Elements of the key with RoPE that is cached beside a latent, and stays exact. None for a
    layer that caches keys and values of heads."""

    @property
    def sides(self) -> tuple[str, ...]:
        """What is rotated: keys and values, or latents."""
        return SIDES if self.rope_dim is None else (LATENT,)

    @property
    def dims(self) -> dict[str, int]:
        """The dimensions of a head's queries, attention outputs, keys and values; or of a latent
        and of what reads it."""
        key, value = self.key_dim, self.value_dim
        if self.rope_dim is not None:
            return {"query": key, "output": key, LATENT: key}
        return {"query": key, "output": value, "key": key, "value": value}

    @property
    def elements(self) -> int:
        """How many numbers are cached of a token."""
        if self.rope_dim is not None:
            return self.key_dim + self.rope_dim
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads


Geometry = list[Layer]


def cached_layers(geometry: Geometry) -> Geometry:
    """The layers that store their own keys and values, and therefore get a rotation."""
    return [layer for layer in geometry if layer.owner == layer.index]


def has_latents(geometry: Geometry) -> bool:
    """Whether any layer caches latents, and not keys and values of heads."""
    return any(layer.rope_dim is not None for layer in geometry)


def shifted_layers(geometry: Geometry) -> list[int]:
    """The layers whose attention changes when a mean is subtracted from all keys."""
    return [layer.index for layer in geometry if layer.shift_invariant is False]


def same_shapes(geometry: Geometry, other: Geometry) -> bool:
    """Whether two geometries have the same layers, heads and dimensions."""
    return _shapes_alone(geometry) == _shapes_alone(other)


def _shapes_alone(geometry: Geometry) -> Geometry:
    return [replace(layer, shift_invariant=None) for layer in geometry]


def geometry_json(geometry: Geometry) -> list[dict[str, Any]]:
    """The `geometry` of a manifest. Properties that were not tried are left out."""
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


@dataclass(frozen=True)
class _Call:
    """The inputs of one layer's attention."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attend: Attention


_Shape = tuple[int, int]  # heads and dimension


def geometry_on_meta(model: "PreTrainedModel") -> Geometry | None:
    """The attention geometry of a model on `meta`. None where its forward needs values; the caller
    then looks at real weights. Raises `UnsupportedModel` with the reason."""
    tower = decoder(model)
    # The default experts loop over the tokens that each expert got, which needs values. Batched
    # experts do not, and have the same shapes.
    if getattr(tower.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("batched_mm")
    try:
        return geometry_of(model)
    except (NotImplementedError, RuntimeError):
        return None


@torch.no_grad()
def geometry_of(model: "PreTrainedModel", ids: torch.Tensor | None = None) -> Geometry:
    """Find the layers that call attention and their heads, and check that the cache stores what was
    captured.

    `ids` `[B, T]` defaults to a few zeros. Raises `UnsupportedModel` with the reason.
    """
    name = type(model).__name__
    if ids is None:
        # On `meta`, where the model is not, accelerate keeps weights that are elsewhere.
        offloaded = hasattr(model, "hf_device_map") and model.device.type == "meta"
        device = "cpu" if offloaded else model.device
        ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=device)
    calls, stored = _run(model, ids)
    if not calls:
        raise UnsupportedModel(
            f"{name} computes attention in code of its own, or none at all: no hook can read it",
            hint="only models that use transformers' attention interface can be calibrated",
        )
    if _is_encoder(model):
        raise UnsupportedModel(
            f"{name} is an encoder: its tokens attend to later ones", hint=CAUSAL_HINT
        )
    if unseen := sorted(stored.keys() - calls.keys()):
        raise UnsupportedModel(
            f"{name} caches keys in layers {unseen} that never called the attention interface"
        )
    return [_layer(name, index, calls, stored) for index in sorted(calls)]


_Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values in a cache


def _run(model: "PreTrainedModel", ids: torch.Tensor) -> tuple[dict[int, _Call], dict[int, _Rows]]:
    """Layer -> inputs of its attention; and layer -> its cached keys and values."""
    calls: dict[int, _Call] = {}

    def record(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        if layer in calls:
            raise UnsupportedModel(
                f"{type(model).__name__} computes attention more than once in a layer, "
                "on other values than it caches"
            )
        calls[layer] = _Call(query, key, value, attend)
        return attend(query, key, value)

    with intercept(model, record):
        output = decoder(model)(input_ids=ids, use_cache=True)
    return calls, _stored_rows(returned_cache(output))


def _layer(name: str, index: int, calls: Mapping[int, _Call], stored: Mapping[int, _Rows]) -> Layer:
    """The attention of one layer. Raises `UnsupportedModel` where the cache stores other things."""
    call = calls[index]
    key_shape, value_shape = _shape(call.key), _shape(call.value)
    if index in stored and _reads_latents(call, *stored[index]):
        rank, rope_dim = (rows.shape[-1] for rows in stored[index])
        return Layer(index, index, call.query.shape[1], 1, rank, rank, rope_dim=rope_dim)
    differs = index in stored and tuple(map(_shape, stored[index])) != (key_shape, value_shape)
    # Some versions of transformers cache what they made of a latent; servers store the latent.
    differs = differs or call.attend.latent is not None
    # One tensor that serves as both keys and values is a latent, too, although it has the shape of
    # one head.
    if call.key is call.value or differs:
        raise UnsupportedModel(
            f"{name} caches a compressed latent (MLA or alike), not the keys and values that its "
            "attention reads",
            hint="nothing to do: no rotation of heads or of latents fits such a cache",
        )
    owner = index if index in stored else _owner(index, calls, stored)
    if owner is None:
        raise UnsupportedModel(
            f"layer {index} of {name} attends to keys and values that no cache layer stores"
        )
    kv_heads, key_dim = key_shape
    return Layer(
        index,
        owner,
        query_heads=call.query.shape[1],
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_shape[1],
        shift_invariant=ignores_shift(call.attend, call.query, call.key, call.value),
    )


def _reads_latents(call: _Call, latents: torch.Tensor, rope: torch.Tensor) -> bool:
    """Whether the keys and values of a call were made of cached latents and of cached keys with
    RoPE, which all heads share. On `meta` only shapes can tell."""
    attend = call.attend
    if attend.latent is None or not hasattr(attend.module, OUTPUT):
        return False
    width = call.key.shape[-1] - rope.shape[-1]
    if latents.shape != attend.latent.shape or (latents.shape[1], rope.shape[1]) != (1, 1):
        return False
    keys, values = expand(attend, attend.latent, call.key, call.value.shape[-1])
    shared = call.key[..., width:]
    pairs = [(keys, call.key), (values, call.value), (latents, attend.latent)]
    if width <= 0 or any(one.shape != other.shape for one, other in pairs):
        return False
    pairs.append((rope.expand_as(shared), shared))
    return call.key.is_meta or all(_are_close(one, other) for one, other in pairs)


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same product, up to the order of its sums."""
    allowed = 64 * torch.finfo(one.dtype).eps * float(other.abs().max())
    return bool((one - other).abs().max() <= allowed)


def _owner(index: int, calls: Mapping[int, _Call], stored: Collection[int]) -> int | None:
    """The latest earlier layer with a cache whose attention read the same keys and values."""
    call = calls[index]
    earlier = [layer for layer in calls if layer < index and layer in stored]
    for layer in sorted(earlier, reverse=True):
        owner = calls[layer]
        if _same_rows(call.key, owner.key) and _same_rows(call.value, owner.value):
            return layer
    return None


def _same_rows(rows: torch.Tensor, earlier: torch.Tensor) -> bool:
    """Whether keys or values are one tensor, or equal. On `meta` there are none to compare."""
    if rows is earlier:
        return True
    if rows.is_meta or rows.shape != earlier.shape:
        return False
    return torch.equal(rows.cpu(), earlier.cpu())


def _is_encoder(model: "PreTrainedModel") -> bool:
    """Whether any attention module of the decoder declares itself not causal."""
    attentions = [module for module in decoder(model).modules() if hasattr(module, "layer_idx")]
    return any(getattr(module, "is_causal", True) is False for module in attentions)


def _shape(tensor: torch.Tensor) -> _Shape:
    return tensor.shape[1], tensor.shape[-1]


def _stored_rows(cache: Any) -> dict[int, _Rows]:
    """Layer -> the keys and the values in the cache. Layers without any are absent."""
    stored = {}
    for index, layer in enumerate(getattr(cache, "layers", [])):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, torch.Tensor) and keys.ndim == 4 and isinstance(values, torch.Tensor):
            stored[index] = keys, values
    return stored


_SMALLEST = 4  # channels: the codes of a byte, and what the kernels take


def check_group_size(group_size: int | None, dims: Collection[int]) -> None:
    """Raise `RotationZooError`, which lists the sizes that work, for a group of channels that does
    not divide each of these head dimensions. None stands for the whole head."""
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
