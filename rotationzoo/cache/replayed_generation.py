"""transformers' own `generate`, whose decoding steps are replays of a CUDA graph."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from rotationzoo.cache.decoding_graph import DecodingGraph
from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.errors import RotationZooError


@contextmanager
def replayed_steps(model: PreTrainedModel, cache: RotatedCache) -> Iterator[None]:
    """Inside the block, calls of the model with one token for this cache are steps of a
    `DecodingGraph`; so `model.generate(..., past_key_values=cache)` samples and streams as always.

    The graph is made with the first of these calls. Where there can be none, calls are what they
    were; and so they are where a mask hides tokens, or where hidden states or attention weights are
    asked for. What changes a cache between its steps, as beams and candidates do, raises
    `UsageError`.
    """
    untyped: Any = model
    forward = untyped.forward
    replaced = vars(model).get("forward")  # as accelerate does it
    steps: list[DecodingGraph] = []
    refused = False

    @wraps(forward)
    def call(*args: Any, **inputs: Any) -> Any:
        nonlocal refused
        ids = inputs.get("input_ids")
        if inputs.get("past_key_values") is not cache or ids is None:
            return forward(*args, **inputs)
        if ids.shape[1] > 1:
            _close(steps)
        elif not steps and not refused and cache.get_seq_length():
            steps.extend([] if _asks_for_more(inputs) else _make_graph(model, cache))
            refused = not steps
        if not steps:
            return forward(*args, **inputs)
        return CausalLMOutputWithPast(logits=steps[0](ids)[:, None], past_key_values=cache)

    untyped.forward = call
    try:
        yield
    finally:
        del untyped.forward  # uncovers the method of the class
        if replaced is not None:
            untyped.forward = replaced
        _close(steps)


def _asks_for_more(inputs: Mapping[str, Any]) -> bool:
    """Whether a call is more than a step: one that reads all tokens, and returns logits."""
    if inputs.get("output_hidden_states") or inputs.get("output_attentions"):
        return True
    mask = inputs.get("attention_mask")
    return mask is not None and not (isinstance(mask, torch.Tensor) and bool(mask.all()))


def _make_graph(model: PreTrainedModel, cache: RotatedCache) -> list[DecodingGraph]:
    """The graph of a step, or nothing where there is none."""
    try:
        steps = [DecodingGraph(model, cache)]
    except RotationZooError:  # the reason does not matter: ordinary steps do the same
        return []
    if not steps[0].captures:
        _close(steps)
    return steps


def _close(steps: list[DecodingGraph]) -> None:
    while steps:
        steps.pop().close()
