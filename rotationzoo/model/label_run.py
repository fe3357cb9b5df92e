"""One run of a model on `meta` in which the labels of its weights are followed into attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from transformers import Cache, PreTrainedModel

from rotationzoo.errors import as_unavailable
from rotationzoo.model.capture import Attention, decoder, intercept
from rotationzoo.model.scale_labels import Constraints, Weight, label_weights
from rotationzoo.model.scale_trace import ScaleTrace

_TOKENS = 2  # more than 1, so that a factor that differs by token would show


@dataclass(frozen=True)
class AttentionLabels:
    """The labels of what one layer's attention reads."""

    query: torch.Tensor
    """`[H_q, T, D]`."""
    key: torch.Tensor
    """`[H_kv, T, D]`."""
    value: torch.Tensor
    """`[H_kv, T, D_v]`."""


@dataclass(frozen=True)
class LabelRun:
    """What was seen in the run."""

    weights: list[Weight]
    constraints: Constraints
    layers: dict[int, AttentionLabels]


@torch.no_grad()
def trace_labels(model: PreTrainedModel, name: str) -> LabelRun:
    """Run a model on `meta`. Raises `ModelUnavailable` if it fails."""
    weights = label_weights(model)
    trace = ScaleTrace(weights)
    layers: dict[int, AttentionLabels] = {}

    def attention(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        layers[layer] = AttentionLabels(*(trace.labels(rows)[0] for rows in (query, key, value)))
        trace.paused = True
        output = attend(query, key, value).contiguous()
        trace.paused = False
        return output

    # A cache returns copies of what it stores; here it returns the tensors themselves.
    uncopied = patch.object(Cache, "update", lambda self, key, value, *args, **kwargs: (key, value))
    labelled = patch.object(torch.nn.Linear, "forward", lambda *args: trace.project(*args))
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    with (
        as_unavailable(f"{name} fails when it runs"),
        uncopied,
        labelled,
        _following(model, trace),
        intercept(model, attention),
        trace,
    ):
        decoder(model)(input_ids=tokens, use_cache=True)
    return LabelRun(weights, trace.constraints, layers)


@contextmanager
def _following(model: PreTrainedModel, trace: ScaleTrace) -> Iterator[None]:
    """Inside the block, the trace knows which module is running."""
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=path: setattr(trace, "inside", path))
        for path, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
