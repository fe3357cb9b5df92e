"""RoPE whose factors depend on how many tokens are read (LongRoPE of Phi, dynamic NTK). Every call
of a request reads with those of the whole request, or keys of its chunks would not fit together."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.model.cache_names import given_cache
from rotationzoo.model.capture import decoder

_BOUNDARY = "original_max_position_embeddings"
_request: ContextVar[SimpleNamespace | None] = ContextVar("request", default=None)


def changing_ropes(tower: torch.nn.Module) -> list[Any]:
    """The modules of a decoder that compute such RoPE."""
    kinds = {each: str(getattr(each, "rope_type", "")) for each in tower.modules()}
    return [each for each, kind in kinds.items() if "longrope" in kind or "dynamic" in kind]


@contextmanager
def reading_whole(model: Any, tokens: int = 0) -> Iterator[None]:
    """Inside the block, all calls have the RoPE of a call with `tokens` tokens, or with the prompt
    and all that may follow in `generate`, or with their own where these are more. `generate` keeps
    its cache, which Phi drops where the factors change; another raises `RotationZooError`."""
    request, ropes = SimpleNamespace(tokens=tokens), changing_ropes(decoder(model))
    with ExitStack() as patches:
        for rope in ropes:
            rope.max_seq_len_cached = 0  # dynamic NTK would keep those of a longer request
            read = partial(_read_whole, request, rope.forward)
            patches.enter_context(patch.object(rope, "forward", read))
        if ropes:
            settle, prepare = (
                model._prepare_cache_for_generation,
                model.prepare_inputs_for_generation,
            )
            new = {"_prepare_cache_for_generation": partial(_note_length, request, settle)}
            new["prepare_inputs_for_generation"] = partial(_prepare, model.config, prepare)
            patches.enter_context(patch.multiple(model, **new))
        patches.callback(_request.reset, _request.set(request))
        yield


def watch_requests(model: Any) -> None:
    """Make a model with such RoPE read each request of its `generate` whole."""
    if changing_ropes(decoder(model)) and "generate" not in vars(model):
        model.generate = MethodType(generate, model)


def generate(model: Any, *args: Any, **options: Any) -> Any:
    """transformers' own `generate` of a model, which reads the request whole."""
    with reading_whole(model):
        return type(model).generate(model, *args, **options)


def check_factors(boundary: int, held: int, new: int, was_long: bool) -> bool:
    """Whether a cache reads `new` tokens with the factors that LongRoPE has for more tokens than
    `boundary`. Raises `RotationZooError` where it has read those `held` with the others."""
    request = _request.get() or SimpleNamespace(tokens=0)
    is_long: bool = max(held + new, request.tokens) > boundary
    if held and is_long != was_long:
        problem = f"LongRoPE has other factors for more than {boundary:,} tokens, and the cache has"
        problem += f" read {held:,} with those for {'more' if was_long else 'fewer'}"
        hint = "read all of them with a new cache, by one call of model.generate"
        raise RotationZooError(problem, hint)
    return is_long


def _read_whole(
    request: SimpleNamespace, forward: Any, rows: Any, position_ids: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    """Cosines and sines with those of the request's last position, which are cut off again."""
    last = position_ids.new_full((*position_ids.shape[:-1], 1), max(0, request.tokens - 1))
    found = forward(rows, torch.cat([position_ids, last], dim=-1), *args)
    return tuple(each[..., :-1, :] for each in found)


def _note_length(request: SimpleNamespace, settle: Any, config: Any, *rest: Any) -> Any:
    request.tokens = config.max_length
    return settle(config, *rest)


def _prepare(config: Any, prepare: Any, *args: Any, **kwargs: Any) -> Any:
    # Phi compares this number of its config with the tokens of a call.
    with patch.object(config, _BOUNDARY, sys.maxsize, create=True):
        inputs = prepare(*args, **kwargs)
    if given_cache(inputs) is not given_cache(kwargs):
        problem = "the model dropped its cache, and would go on with another one"
        raise RotationZooError(problem, hint="look at: rotationzoo evaluate")
    return inputs
