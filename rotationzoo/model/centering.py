"""Whether a mean may be subtracted from all keys, which is exact only where attention ignores what
they share.

A softmax over keys alone does: `q (k - c)` is less than `q k` by one number for all keys that a
query reads. Learned sinks beside them keep their logits, and a soft cap is not linear: there it
moves the output. There is no list of such models: attention is tried, as capture is, on keys with
and without a shift.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.model.capture import Attention, decoder, eager_attention, intercept

# The largest change of an output, relative to the largest output, that counts as none. Measured on
# tiny models of 20 families: at most 2e-6 where a shift cancels, .5 and more where it does not.
NONE = 1e-3
_LOGITS = 3.0  # of queries and keys: a cap of 50 must show, and 1 - exp(-30) is 1
_TOKENS = 16


def ignores_shift(
    attend: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    """Whether this attention gives the same for keys that are all shifted alike: tried on the CPU
    with random numbers in place of queries `[B, H_q, T, D]`, keys and values `[B, H, T, D]`, and of
    the weights that the attention reads, so that no weights are needed. What cannot be tried is not
    trusted."""
    generator = torch.Generator().manual_seed(0)
    drawn: dict[int, torch.Tensor] = {}

    def draw(given: Any) -> Any:
        """Numbers in the shape of a tensor, the same for the same tensor: sinks are a weight and an
        argument."""
        if not isinstance(given, torch.Tensor):
            return given
        if id(given) not in drawn:
            like = torch.randn(given.shape, generator=generator, dtype=torch.float64)
            drawn[id(given)] = (
                like if given.is_floating_point() else torch.zeros(given.shape, dtype=given.dtype)
            )
        return drawn[id(given)]

    module = copy.copy(attend.module)
    module._parameters = {
        name: _parameter(draw(tensor)) for name, tensor in attend.module._parameters.items()
    }
    module._buffers = {name: draw(tensor) for name, tensor in attend.module._buffers.items()}
    options = {name: draw(option) for name, option in attend.options.items()}
    q, k, v = (_LOGITS * _rows(tensor, generator) for tensor in (query, key, value))
    shift = _LOGITS * _rows(key, generator)[:, :, :1]
    seen = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()[None, None]
    hidden = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(
        ~seen, torch.finfo(torch.float32).min
    )
    attempts = [replace(attend, module=module, mask=seen, options=options)]
    try:
        eager = eager_attention(attend.module)
        attempts.insert(
            0, replace(attend, module=module, function=eager, mask=hidden, options=options)
        )
    except AttributeError:
        pass
    for attempt in attempts:
        try:
            plain = attempt(q, k, v)
            moved = max(
                (attempt(q, k + sign * shift, v) - plain).abs().max().item() for sign in (1, -1)
            )
        except Exception:  # each attention asks for something else
            continue
        return moved <= NONE * plain.abs().max().item()
    return False


def _rows(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`[1, H, T, D]` with the heads and the dimension of a tensor."""
    return torch.randn(
        1, like.shape[1], _TOKENS, like.shape[3], generator=generator, dtype=torch.float64
    )


def _parameter(tensor: torch.Tensor | None) -> torch.nn.Parameter | None:
    return None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)


@torch.no_grad()
def layers_moved(model: PreTrainedModel, ids: torch.Tensor) -> list[int]:
    """The layers whose attention weights for `ids` `[B, T]` are others over keys without their
    mean, in a model as it was loaded, whatever a look at it without weights has said."""
    length = ids.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    moved: dict[int, float] = {}

    def compare(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        reading = replace(attend, mask=hidden.to(query.device))
        centered = key.float() - key.float().mean(2, keepdim=True)
        change = reading.weights(query, centered) - reading.weights(query, key)
        moved[layer] = change.abs().max().item()
        return attend(query, key, value)

    with intercept(model, compare):
        decoder(model)(input_ids=ids, use_cache=False)
    return sorted(layer for layer, change in moved.items() if not change <= NONE)


def reason(layers: Sequence[int]) -> str:
    """Why keys may not be stored without their mean, of the layers whose attention a shift
    moves."""
    shown = (
        f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers, {layers[0]} the first"
    )
    return (
        f"attention depends on what all keys share, as with learned sinks or a soft cap ({shown})"
    )
