"""RoPE whose factors depend on how many tokens are read (LongRoPE of Phi, dynamic NTK). Every call
of a request reads with those of the whole request, or keys of its chunks would not fit together."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.model.cache_names import given_cache
from rotationzoo.model.capture import decoder

_BOUNDARY = "original_max_position_embeddings"
_ALONE = SimpleNamespace(tokens=0)  # a call that is no part of a request
_request = ContextVar("request", default=_ALONE)


def changing_ropes(tower: torch.nn.Module) -> list[Any]:
    """The modules of a decoder that compute such RoPE."""
    kinds = {each: str(getattr(each, "rope_type", "")) for each in tower.modules()}
    return [each for each, kind in kinds.items() if "longrope" in kind or "dynamic" in kind]


@contextmanager
def reading_whole(model: Any, tokens: int = 0) -> Iterator[SimpleNamespace]:
    """Inside the block, all calls have the RoPE of a call with `tokens` tokens, which may be set
    later, or with their own where these are more. The model's `generate` keeps its cache, which Phi
    drops where the factors change; another one raises `RotationZooError`."""
    request, ropes = SimpleNamespace(tokens=tokens), changing_ropes(decoder(model))
    with ExitStack() as patches:
        for rope in ropes:
            rope.max_seq_len_cached = 0  # dynamic NTK would keep those of a longer request
            read = partial(_read_whole, request, rope.forward)
            patches.enter_context(patch.object(rope, "forward", read))
        if ropes:
            prepare = model.prepare_inputs_for_generation
            keep = wraps(prepare)(partial(_prepare, model, prepare))
            patches.enter_context(patch.object(model, "prepare_inputs_for_generation", keep))
        patches.callback(_request.reset, _request.set(request))
        yield request


def watch_requests(model: Any) -> None:
    """Make a model with such RoPE read each request of its `generate` whole."""
    if changing_ropes(decoder(model)) and "generate" not in vars(model):
        model.generate = MethodType(generate, model)


def generate(model: Any, *args: Any, **options: Any) -> Any:
    """transformers' own `generate`, with the RoPE for the prompt and all tokens that may follow."""
    settle = model._prepare_cache_for_generation

    def note_length(config: Any, *rest: Any) -> Any:
        request.tokens = config.max_length
        return settle(config, *rest)

    noting = patch.object(model, "_prepare_cache_for_generation", note_length)
    with reading_whole(model) as request, noting:
        return type(model).generate(model, *args, **options)


@dataclass
class FactorCheck:
    """Compares the factors of LongRoPE with which the tokens of one cache are read."""

    boundary: int | None
    """The most tokens that are read with its short factors; None for other RoPE."""
    is_long: bool = False

    def check(self, held: int, new: int) -> None:
        """Raise `RotationZooError` where `new` tokens have other factors than those `held`."""
        assert self.boundary is not None
        is_long = max(held + new, _request.get().tokens) > self.boundary
        if held and is_long != self.is_long:
            raise RotationZooError(
                f"LongRoPE has other factors for more than {self.boundary:,} tokens, and the cache "
                f"has read {held:,} with those for {'more' if self.is_long else 'fewer'}",
                hint="read all of them with a new cache, by one call of model.generate",
            )
        self.is_long = is_long


def _read_whole(
    request: SimpleNamespace, forward: Any, rows: Any, position_ids: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    """Cosines and sines with those of the request's last position, which are cut off again."""
    last = position_ids.new_full((*position_ids.shape[:-1], 1), max(0, request.tokens - 1))
    found = forward(rows, torch.cat([position_ids, last], dim=-1), *args)
    return tuple(each[..., :-1, :] for each in found)


def _prepare(model: Any, prepare: Any, *args: Any, **options: Any) -> Any:
    given, hiding = given_cache(options), ExitStack()
    if hasattr(model.config, _BOUNDARY):  # Phi compares it with the tokens of a call
        hiding.enter_context(patch.object(model.config, _BOUNDARY, sys.maxsize))
    with hiding:
        inputs = prepare(*args, **options)
    if given is not None and given_cache(inputs) is not given:
        problem = f"{type(model).__name__} dropped its cache, and would go on with another one"
        raise RotationZooError(problem, hint="look at: rotationzoo evaluate")
    return inputs
