"""The attention of a model: which layers store keys and values, with what heads and dimensions.

There is no list of models. The model runs on a few tokens, usually on `meta` without weights, and
what attention was handed is held against what the cache stores.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.model.capture import Attention, decoder, intercept
from rotationzoo.model.centering import ignores_shift

_PROBE_TOKENS = 8
CAUSAL_HINT = "give a decoder-only model, such as Qwen/Qwen3-8B, or demo"
_LATENT_HINT = "nothing to do: a rotation per KV head does not fit such a cache"


@dataclass(frozen=True)
class Layer:
    """The attention of one layer. `owner` is the layer whose cache it reads: itself, or an earlier
    one that it shares."""

    index: int
    owner: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    shift_invariant: bool | None = None
    """Whether its attention ignores what all keys share, so that a mean subtracted from them
    changes nothing. None where nobody has tried: files imported for no model, artifacts of earlier
    versions."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads


Geometry = list[Layer]


def cached_layers(geometry: Geometry) -> Geometry:
    """The layers that store keys and values of their own: those that get a rotation."""
    return [layer for layer in geometry if layer.owner == layer.index]


def shifted_layers(geometry: Geometry) -> list[int]:
    """The layers whose attention is moved by a mean subtracted from all keys."""
    return [layer.index for layer in geometry if layer.shift_invariant is False]


def same_shapes(geometry: Geometry, other: Geometry) -> bool:
    """Whether two geometries have the same layers, heads and dimensions, whatever is known of them
    besides."""
    one, two = (
        [replace(layer, shift_invariant=None) for layer in layers] for layers in (geometry, other)
    )
    return one == two


def geometry_json(geometry: Geometry) -> list[dict[str, Any]]:
    """What nobody has tried is left out."""
    layers = (asdict(layer) for layer in geometry)
    return [{name: value for name, value in layer.items() if value is not None} for layer in layers]


def geometry_from_json(content: list[dict[str, Any]]) -> Geometry:
    """Inverse of `geometry_json`. Raises `RotationZooError` for anything else."""
    try:
        return [Layer(**layer) for layer in content]
    except TypeError as error:
        raise RotationZooError("the geometry in the manifest is damaged") from error


def geometry_on_meta(model: PreTrainedModel) -> Geometry | None:
    """The attention geometry of a model on `meta`, or None where its forward needs values (then
    look at real weights)."""
    tower = decoder(model)
    # The default experts loop over the tokens each expert got, which needs values; batched ones
    # have the same shapes.
    if getattr(tower.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("batched_mm")
    try:
        return geometry_of(model)
    except (NotImplementedError, RuntimeError):
        return None


@torch.no_grad()
def geometry_of(model: PreTrainedModel, ids: torch.Tensor | None = None) -> Geometry:
    """Who calls attention, with what heads, and whether the cache stores what was captured.

    `ids` `[B, T]` defaults to a few zeros on the model's device. Raises `UnsupportedModel` with the
    reason.
    """
    name = type(model).__name__
    # Older versions of transformers cache the expanded keys and values of MLA, where servers store
    # the latent.
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise UnsupportedModel(_latent(name), hint=_LATENT_HINT)
    tower = decoder(model)
    if ids is None:
        ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=model.device)
    calls: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    attention: dict[int, Attention] = {}

    def note(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        if layer in calls:
            raise UnsupportedModel(
                f"{name} computes attention more than once in a layer, on other values than it caches"
            )
        calls[layer], attention[layer] = (query, key, value), attend
        return attend(query, key, value)

    with intercept(model, note):
        cache = getattr(tower(input_ids=ids, use_cache=True), "past_key_values", None)
    if not calls:
        raise UnsupportedModel(
            f"{name} computes attention in code of its own, or none at all: no hook can read it",
            hint="only models that use transformers' attention interface can be calibrated",
        )
    acausal = [
        m
        for m in tower.modules()
        if hasattr(m, "layer_idx") and getattr(m, "is_causal", True) is False
    ]
    if acausal:
        raise UnsupportedModel(
            f"{name} is an encoder: its tokens attend to later ones", hint=CAUSAL_HINT
        )
    stored = _stored(cache)
    if unseen := sorted(stored.keys() - calls.keys()):
        raise UnsupportedModel(
            f"{name} caches keys in layers {unseen} that never called the attention interface"
        )
    geometry = []
    for index, (query, key, value) in sorted(calls.items()):
        shapes = (_heads_and_dim(key), _heads_and_dim(value))
        # One tensor read as both keys and values is a latent too, although its shape is that of one
        # head.
        if key is value or (index in stored and stored[index] != shapes):
            raise UnsupportedModel(_latent(name), hint=_LATENT_HINT)
        owner = index if index in stored else _owner(index, key, calls, stored.keys())
        if owner is None:
            raise UnsupportedModel(
                f"layer {index} of {name} attends to keys and values that no cache layer stores"
            )
        ignores = ignores_shift(attention[index], query, key, value)
        geometry.append(Layer(index, owner, query.shape[1], *shapes[0], shapes[1][1], ignores))
    return geometry


def _latent(name: str) -> str:
    return f"{name} caches a compressed latent (MLA or alike), not the keys and values that its attention reads"


def _heads_and_dim(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[1], tensor.shape[-1]


def _stored(cache: Any) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """Layer -> (heads, dim) of the keys and of the values that the cache holds; layers without any
    are absent."""
    stored = {}
    for index, layer in enumerate(getattr(cache, "layers", [])):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, torch.Tensor) and keys.ndim == 4 and isinstance(values, torch.Tensor):
            stored[index] = _heads_and_dim(keys), _heads_and_dim(values)
    return stored


def _owner(index: int, key: torch.Tensor, calls: dict[int, Any], stored: Any) -> int | None:
    """The latest earlier layer with a cache that was handed the very same keys."""
    for other in sorted(
        (layer for layer in calls if layer < index and layer in stored), reverse=True
    ):
        theirs = calls[other][1]
        same_values = (
            not key.is_meta and key.shape == theirs.shape and torch.equal(key.cpu(), theirs.cpu())
        )
        if key is theirs or same_values:
            return other
    return None
