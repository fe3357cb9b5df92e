"""Whether a mean may be subtracted from all keys: only if the model's attention ignores a shift
that they share.

A plain softmax over keys ignores it: `q (k - c)` is less than `q k` by the same amount for every
key that a query reads. With learned sinks, whose logits do not shift, or with a soft cap, which is
not linear, the output changes. There is no list of such models. Their attention is tried on keys
with and without a shift.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from rotationzoo.model.capture import Attention, eager_attention

# Changes of the output up to this, relative to the largest output, count as none. On tiny models
# of 20 families the change is at most 2e-6 where a shift cancels, and .5 or more where it does not.
NONE = 1e-3
# Scale of queries and keys: large enough for a soft cap of 50 to show, and small enough not to
# saturate a softmax, where 1 - exp(-30) is 1.
_LOGITS = 3.0
_TOKENS = 16


def ignores_shift(
    attend: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    """Whether this attention gives the same output when all keys are shifted alike.

    It is tried on the CPU, with random numbers for the queries `[B, H_q, T, D]`, the keys and
    values `[B, H, T, D]` and the weights that the attention reads. One that cannot be tried counts
    as one that does not ignore the shift.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = _with_random_numbers(attend, generator)
    queries, keys, values = (_LOGITS * _rows(like, generator) for like in (query, key, value))
    shift = _LOGITS * _rows(key, generator)[:, :, :1]
    # A causal mask, in boolean and in additive form.
    visible = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool).tril()
    zeros = torch.zeros(visible.shape, dtype=torch.float64)
    hidden = zeros.masked_fill(~visible, torch.finfo(torch.float32).min)
    attempts = [replace(drawn, mask=visible)]
    with suppress(AttributeError):  # of a module without an eager implementation, which is first
        eager = eager_attention(attend.module)
        attempts.insert(0, replace(drawn, function=eager, mask=hidden))
    for attempt in attempts:
        try:
            plain = attempt(queries, keys, values)
            up = (attempt(queries, keys + shift, values) - plain).abs().max().item()
            down = (attempt(queries, keys - shift, values) - plain).abs().max().item()
        except Exception:  # attention functions fail in different ways on inputs they cannot take
            continue
        return max(up, down) <= NONE * plain.abs().max().item()
    return False


def _with_random_numbers(attend: Attention, generator: torch.Generator) -> Attention:
    """The same call, with random numbers in place of its module's weights and of its tensor
    options."""
    drawn: dict[int, torch.Tensor] = {}

    def draw(given: Any) -> Any:
        """Random numbers in the shape of a tensor. The same tensor always gets the same numbers,
        because sinks are passed both as a weight and as an option."""
        if not isinstance(given, torch.Tensor):
            return given
        if id(given) not in drawn:
            # Drawn for integers, too, which then become zeros.
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


def reason(layers: Sequence[int]) -> str:
    """Why keys may not be stored without their mean, by the layers that a shift changes."""
    where = f"layer {layers[0]}"
    if len(layers) > 1:
        where = f"{len(layers)} layers, {layers[0]} the first"
    return (
        f"attention depends on what all keys share, as with learned sinks or a soft cap ({where})"
    )
