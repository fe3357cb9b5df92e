"""RoPE whose factors depend on the number of tokens (LongRoPE of Phi, dynamic NTK). All calls of a
request use the factors of the whole request, so that its keys fit together."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.model.capture import decoder, given_cache

_BOUNDARY = "original_max_position_embeddings"
_tokens = ContextVar("tokens", default=0)
"""The number of tokens of the current request, with those that may follow."""


def changing_ropes(tower: torch.nn.Module) -> list[Any]:
    """The modules of a decoder that compute such RoPE."""
    kinds = {each: str(getattr(each, "rope_type", "")) for each in tower.modules()}
    return [each for each, kind in kinds.items() if "longrope" in kind or "dynamic" in kind]


@contextmanager
def reading_whole(model: Any, tokens: int = 0) -> Iterator[None]:
    """Inside the block, calls have the RoPE factors of `tokens` tokens, or of `generate`'s maximum
    or their own if longer. Raises `RotationZooError` if `generate` drops its cache, as Phi does."""
    with ExitStack() as patches:
        for rope in (ropes := changing_ropes(decoder(model))):
            rope.max_seq_len_cached = 0  # dynamic NTK would keep the factors of a longer request
            patches.enter_context(patch.object(rope, "forward", partial(_read, rope.forward)))
        if ropes:
            settle = partial(_note_length, model._prepare_cache_for_generation)
            prepare = partial(_prepare, model.config, model.prepare_inputs_for_generation)
            new: dict[str, Any] = {"_prepare_cache_for_generation": settle}
            new["prepare_inputs_for_generation"] = prepare
            patches.enter_context(patch.multiple(model, **new))
        patches.callback(_tokens.reset, _tokens.set(max(tokens, _tokens.get())))
        yield


def generate(model: Any, *args: Any, **options: Any) -> Any:
    """transformers' own `generate`, with the RoPE factors of the whole request."""
    with reading_whole(model):
        return type(model).generate(model, *args, **options)


def check_factors(boundary: int, held: int, new: int, was_long: bool) -> bool:
    """Whether `new` tokens get the long factors. `RotationZooError` if `held` ones differ."""
    is_long = max(held + new, _tokens.get()) > boundary
    if held and is_long != was_long:
        problem = f"LongRoPE has other factors for more than {boundary:,} tokens, and the cache has"
        problem += f" read {held:,} with those for {'more' if was_long else 'fewer'}"
        hint = "read all of them with a new cache, by one call of model.generate"
        raise RotationZooError(problem, hint)
    return is_long


def _read(
    forward: Any, rows: Any, position_ids: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    """Cosines and sines, computed together with the request's last position."""
    last = position_ids.new_full((*position_ids.shape[:-1], 1), max(0, _tokens.get() - 1))
    found = forward(rows, torch.cat([position_ids, last], dim=-1), *args)
    return tuple(each[..., :-1, :] for each in found)


def _note_length(settle: Any, config: Any, *rest: Any) -> Any:
    _tokens.set(config.max_length)
    return settle(config, *rest)


def _prepare(config: Any, prepare: Any, *args: Any, **kwargs: Any) -> Any:
    # Phi compares this entry of its config with the tokens of a call.
    with patch.object(config, _BOUNDARY, sys.maxsize, create=True):
        inputs = prepare(*args, **kwargs)
    if given_cache(inputs) is not given_cache(kwargs):
        problem = "the model dropped its cache, and would continue with another one"
        raise RotationZooError(problem, hint="look at: rotationzoo evaluate")
    return inputs
