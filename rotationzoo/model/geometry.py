"""Reads a model's attention geometry: the layers that store keys and values, their heads and sizes.
A model runs on a few tokens, and attention's inputs are compared with the cache."""

import copy
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from rotationzoo.errors import UnsupportedModel, as_unavailable
from rotationzoo.geometry import Geometry, Layer
from rotationzoo.model.capture import (
    Attention,
    Call,
    decoder,
    eager_attention,
    intercept,
    returned_cache,
)
from rotationzoo.model.changing_rope import changing_ropes
from rotationzoo.model.latent import Latents, Rows, cached_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 8
_say_once = cache(logging.getLogger("rotationzoo").warning)
CAUSAL_HINT = "give a decoder-only model, such as Qwen/Qwen3-8B, or demo"


def geometry_on_meta(model: "PreTrainedModel") -> Geometry | None:
    """The geometry of a model on `meta`; None if it needs values. Raises `UnsupportedModel`."""
    name, tower = type(model).__name__, decoder(model)
    # The default experts loop over tokens, which needs values; batched experts do not.
    if getattr(tower.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("batched_mm")
    for rope in changing_ropes(tower):  # it compares positions, but needs no weights
        rope.forward = partial(_shapes_of, type(rope)(rope.config))
    table = tower.config.to_dict().items()
    numbers = [f"{key} {value}" for key, value in table if "head" in key or key == "hidden_size"]
    hint = "compare its config.json with that of the original"
    with as_unavailable(f"{name} cannot run with {', '.join(numbers)}", hint):
        try:
            return geometry_of(model)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error).lower():  # all errors about missing values have it
                raise
    # On `meta`, only the shape of the experts' output matters.
    for path, module in tower.named_modules():
        if path.endswith("experts"):
            module.forward = lambda rows, *_, **__: torch.empty_like(rows)
    with suppress(NotImplementedError, RuntimeError):
        geometry = geometry_of(model)
        _say_once("Note: experts of %s need values: its layers are read from its config", name)
        return geometry
    return None


def _shapes_of(twin: torch.nn.Module, *given: Any, **named: Any) -> Any:
    """The output of RoPE on `meta`, from its twin on the CPU, which reads zeros."""
    zeros = [torch.zeros_like(each, device="cpu") for each in (*given, *named.values())]
    return tuple(each.to("meta") for each in twin(*zeros))


@torch.no_grad()
def geometry_of(model: "PreTrainedModel", ids: torch.Tensor | None = None) -> Geometry:
    """Find the layers that call attention and their heads on `ids` `[B, T]`, by default a few
    zeros, and check that the cache stores the captured rows. Raises `UnsupportedModel`."""
    name = type(model).__name__
    if ids is None:
        # accelerate moves offloaded weights to `meta`.
        offloaded = hasattr(model, "hf_device_map") and model.device.type == "meta"
        device = "cpu" if offloaded else model.device
        ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=device)
    calls, stored = _run(model, ids)
    if not calls:
        hint = "only models that use transformers' attention interface can be calibrated"
        own = "computes attention in its own code, or has none: no hook can read it"
        raise UnsupportedModel(f"{name} {own}", hint)
    attentions = [module for module in decoder(model).modules() if hasattr(module, "layer_idx")]
    if any(getattr(module, "is_causal", True) is False for module in attentions):
        problem = f"{name} is an encoder: its tokens attend to later ones"
        raise UnsupportedModel(problem, CAUSAL_HINT)
    if unseen := sorted(stored.keys() - calls.keys()):
        raise UnsupportedModel(f"{name} caches keys in layers {unseen} that no hook has seen")
    return [_layer(name, index, calls, stored) for index in sorted(calls)]


def _run(model: "PreTrainedModel", ids: torch.Tensor) -> tuple[dict[int, Call], dict[int, Rows]]:
    """Layer -> its attention call; and layer -> its cached keys and values."""
    calls, name = dict[int, Call](), type(model).__name__

    def record(call: Call) -> torch.Tensor:
        if call.layer in (None, -1):
            raise UnsupportedModel(f"{name} shares attention among layers: calls name no layer")
        if call.layer in calls:
            twice = "attention more than once in a layer, on other values than it caches"
            raise UnsupportedModel(f"{name} computes {twice}")
        calls[call.layer] = call
        return call.run()

    with intercept(model, record):
        output = decoder(model)(input_ids=ids, use_cache=True)
    stored = {}  # layer -> keys and values, if the layer has a cache of them
    for index, layer in enumerate(getattr(returned_cache(output), "layers", [])):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, torch.Tensor) and keys.ndim == 4 and isinstance(values, torch.Tensor):
            stored[index] = keys, values
    return calls, stored


def _layer(name: str, index: int, calls: Mapping[int, Call], stored: Mapping[int, Rows]) -> Layer:
    """The attention of one layer. Raises `UnsupportedModel` if its cache stores other rows."""
    call, rows = calls[index], stored.get(index)
    cached = cached_of(call)
    # One tensor that serves as both keys and values is a latent, even in the shape of one head.
    if call.key is call.value or not cached.is_in(rows):
        hint = "nothing to do: no rotation of heads or of latents fits such a cache"
        held, read = (rows or (call.key,))[0].shape, call.key.shape
        instead = "a compressed latent (as in MLA), not the keys and values that attention reads"
        if held[-1] == read[-1] and held[1] != read[1] and call.attend.latent is None:
            instead = f"{held[1]} heads of keys and values, from which attention makes {read[1]}"
        raise UnsupportedModel(f"{name} caches {instead}", hint)
    query_heads = call.query.shape[1]
    if isinstance(cached, Latents):
        rank, rope_dim = (each.shape[-1] for each in rows or ())
        return Layer(index, index, query_heads, 1, rank, rank, rope_dim=rope_dim)
    owner = index if rows is not None else _owner(index, calls, stored)
    if owner is None:
        problem = f"layer {index} of {name} attends to keys and values that no cache layer stores"
        raise UnsupportedModel(problem)
    _, kv_heads, _, key_dim = call.key.shape
    unshifted = ignores_shift(call.attend, call.query, call.key, call.value)
    return Layer(index, owner, query_heads, kv_heads, key_dim, call.value.shape[-1], unshifted)


def _owner(index: int, calls: Mapping[int, Call], stored: Collection[int]) -> int | None:
    """The latest earlier layer with a cache whose attention read the same keys and values."""
    call = calls[index]
    for layer in sorted(stored, reverse=True):
        same = layer < index and _same_rows(call.key, calls[layer].key)
        if same and _same_rows(call.value, calls[layer].value):
            return layer
    return None


def _same_rows(rows: torch.Tensor, earlier: torch.Tensor) -> bool:
    """Whether keys or values are one tensor, or equal. On `meta` they have no values to compare."""
    return rows is earlier or (not rows.is_meta and torch.equal(rows.cpu(), earlier.cpu()))


# ---- whether attention ignores a shift that all keys share


# The largest relative change of the output that counts as none. On tiny models of 20 families it is
# at most 2e-6 if a shift cancels, and 0.5 or more if not.
NONE = 1e-3
# Scale of queries and keys: large enough to show a soft cap of 50, and too small to saturate a
# softmax.
_LOGITS = 3.0
_TOKENS = 16


def ignores_shift(
    attend: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    """Whether this attention gives the same output when all keys shift together, tried on the CPU
    with random inputs and weights. If it cannot be tried, the answer is no."""
    generator = torch.Generator().manual_seed(0)
    drawn = _with_random_numbers(attend, generator)
    queries, keys, values = (_LOGITS * _rows(like, generator) for like in (query, key, value))
    shift = _LOGITS * _rows(key, generator)[:, :, :1]
    visible = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool).tril()
    zeros = torch.zeros(visible.shape, dtype=torch.float64)
    hidden = zeros.masked_fill(~visible, torch.finfo(torch.float32).min)
    attempts = [replace(drawn, mask=visible)]
    with suppress(AttributeError):  # the module may have no eager implementation
        attempts.insert(0, replace(drawn, function=eager_attention(attend.module), mask=hidden))
    for attempt in attempts:
        try:
            plain = attempt(queries, keys, values)
            up = (attempt(queries, keys + shift, values) - plain).abs().max().item()
            down = (attempt(queries, keys - shift, values) - plain).abs().max().item()
        except Exception:  # attention functions fail in different ways
            continue
        return max(up, down) <= NONE * plain.abs().max().item()
    return False


def _with_random_numbers(attend: Attention, generator: torch.Generator) -> Attention:
    """The same call, with random numbers for its module's weights and its tensor options."""
    drawn: dict[int, torch.Tensor] = {}

    def draw(given: Any) -> Any:
        """The same random numbers for the same tensor: sinks are both a weight and an option."""
        if not isinstance(given, torch.Tensor):
            return given
        if id(given) not in drawn:
            # Drawn even for integers, which become zeros, to keep the order of draws.
            numbers = torch.randn(given.shape, generator=generator, dtype=torch.float64)
            if not given.is_floating_point():
                numbers = torch.zeros(given.shape, dtype=given.dtype)
            drawn[id(given)] = numbers
        return drawn[id(given)]

    module = copy.copy(attend.module)
    module._parameters = {name: draw(each) for name, each in attend.module._parameters.items()}
    module._buffers = {name: draw(each) for name, each in attend.module._buffers.items()}
    options = {name: draw(option) for name, option in attend.options.items()}
    return replace(attend, module=module, options=options)


def _rows(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random rows `[1, H, T, D]` with the heads and the dimension of `like`."""
    shape = (1, like.shape[1], _TOKENS, like.shape[3])
    return torch.randn(shape, generator=generator, dtype=torch.float64)
