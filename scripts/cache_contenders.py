"""The caches that `benchmark_caches` compares, all of them real, and how a model reads, what it
holds and how fast it decodes through one."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from loading import DEVICE
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import CacheLayerMixin
from transformers_caches import CACHES, GROUP, ThroughCache, TransformersCache, unpack_in_torch

from rotationzoo import RotatedCache
from rotationzoo.artifact.store import Artifact
from rotationzoo.model.geometry import Geometry, cached_layers

WINDOWS = ((64, 256), (32, 96), (8, 32))
"""Sink and recent tokens: the default, and those with which the format `vllm` takes about as many
bytes at 2,048 tokens as a 2-bit cache of transformers whose residual is 320 and 128 tokens."""
RESIDUALS = (128, 320)
"""The most exact tokens of a cache of transformers: its default, and as many as `WINDOWS[0]`."""
_PERIOD = 128  # decoded tokens that are measured
_WARM_UP = 4  # decoded tokens before them
_STEPS = 64  # of decoding that are timed, at least


@dataclass(frozen=True)
class Contender:
    """One kind of cache."""

    name: str
    reader: Callable[..., Any]
    """Called like the model, with token ids alone."""
    create: Callable[[], Cache]
    """An empty cache for one request."""
    period: int = _PERIOD
    """Tokens after which a cache has flushed once: its bytes rise and fall meanwhile."""


class ThroughCalls:
    """A model that reads all tokens before the first wanted logits in one call, as a prompt, and
    the others `step` tokens a call."""

    def __init__(self, model: PreTrainedModel, create: Callable[[], Cache], step: int):
        self.model, self.create, self.step = model, create, step
        self.device = model.device

    def __call__(self, input_ids: torch.Tensor, logits_to_keep: int, **_: Any) -> SimpleNamespace:
        """The last `logits_to_keep` logits of token ids `[B, T]`."""
        untyped: Any = self.model
        start = input_ids.shape[1] - logits_to_keep
        past = self.create()
        untyped(input_ids=input_ids[:, :start], past_key_values=past, logits_to_keep=1)
        logits = []
        for piece in input_ids[:, start:].split(self.step, dim=1):
            logits.append(untyped(input_ids=piece, past_key_values=past).logits)
        return SimpleNamespace(logits=torch.cat(logits, dim=1))


def exact_cache(model: PreTrainedModel, step: int) -> Contender:
    """transformers' own cache, which stores what the model computes."""

    def create() -> Cache:
        return DynamicCache(config=model.config)

    return Contender("DynamicCache", ThroughCalls(model, create, step), create)


def library_cache(model: PreTrainedModel, name: str, residual: int) -> Contender:
    """A quantized cache of transformers: an entry of `CACHES` with a residual."""
    cache = replace(CACHES[name], residual=residual)

    def create() -> Cache:
        return as_users_make_it(model, cache)

    title = name if residual == RESIDUALS[0] else f"{name}, residual {residual}"
    return Contender(title, ThroughCache(model, cache), create, residual)


def as_users_make_it(model: PreTrainedModel, cache: TransformersCache) -> Cache:
    """The class that transformers offers, for a single row."""
    if cache.backend == "quanto":
        unpack_in_torch()
    return QuantizedCache(
        cache.backend,
        model.config,
        nbits=cache.bits,
        axis_key=cache.axis,
        axis_value=cache.axis,
        q_group_size=GROUP,
        residual_length=cache.residual,
    )


def rotated_cache(
    model: PreTrainedModel, title: str, artifact: Artifact | None, step: int, **options: Any
) -> Contender:
    """This project's cache. Before a chunk it keeps its recent window exact, as when decoding."""
    cache = RotatedCache(artifact, model, prefill_layout="window", **options)

    def create() -> Cache:
        cache.reset()
        return cache

    windows = f"{options['sink']}/{options['recent']}"
    name = f"{title}, {options['format']}"
    if windows != "64/256":
        name += f", windows {windows}"
    return Contender(name, ThroughCalls(model, create, step), create)


def held_bytes(cache: Cache) -> int:
    """The bytes of every tensor that a cache holds, with scales, zeros and exact tokens."""
    if isinstance(cache, RotatedCache):
        return cache.bytes_held
    storages = {}
    for tensor in _tensors(cache.layers):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    """Every plain tensor in layers, containers and tensors that are made of others."""
    if hasattr(held, "__tensor_flatten__"):
        names, _ = held.__tensor_flatten__()
        yield from _tensors([getattr(held, name) for name in names])
    elif isinstance(held, torch.Tensor):
        if held.numel():
            yield held
    elif isinstance(held, CacheLayerMixin):
        yield from _tensors(vars(held))
    elif isinstance(held, dict):
        yield from _tensors(list(held.values()))
    elif isinstance(held, list | tuple):
        for part in held:
            yield from _tensors(part)


@torch.no_grad()
def measure_decoding(
    model: PreTrainedModel, geometry: Geometry, contender: Contender, ids: torch.Tensor
) -> dict[str, float]:
    """Bits per element that one request holds on average, and tokens per second, while a model
    decodes greedily after a prompt. Both end together at the length of `ids` `[1, T]`.

    * `bits`: 16 times the bytes held, over those of bfloat16, without the rotations;
    * `bytes`: those held at the end.
    """
    untyped: Any = model
    cached = cached_layers(geometry)
    bf16 = 2 * sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in cached)
    cache = contender.create()
    # Whole periods, because a residual fills up and is emptied, and enough steps for a mean.
    steps = -(-_STEPS // contender.period) * contender.period
    prompt = ids[:, : ids.shape[1] - steps - _WARM_UP]
    token = untyped(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
    seconds, bits = 0.0, []
    for number in range(-_WARM_UP, steps):
        started = _now()
        output = untyped(input_ids=token, past_key_values=cache, logits_to_keep=1)
        token = output.logits.argmax(-1)
        if number >= 0:
            seconds += _now() - started
            bits.append(16 * held_bytes(cache) / (bf16 * cache.get_seq_length()))
    return {
        "context": cache.get_seq_length(),
        "bits": sum(bits) / len(bits),
        "bytes": held_bytes(cache),
        "tokens_per_second": steps / seconds,
    }


def _now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
