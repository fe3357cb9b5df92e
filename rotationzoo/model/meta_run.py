"""One run of a model on `meta`, followed by a trace that sees attention, linear modules and every
operation."""

from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel

from rotationzoo.errors import as_unavailable
from rotationzoo.model.capture import Attention, decoder, intercept

_TOKENS = 2  # more than 1, so that what differs by token shows


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query `[B, H_q, T, D]`, key `[B, H_kv, T, D]` and value `[B, H_kv, T, D_v]`."""


class LinearCall(NamedTuple):
    """The input and output of a linear module."""

    states: torch.Tensor
    output: torch.Tensor


class Operation(NamedTuple):
    """One operation, with the tensors among its arguments and results."""

    function: Any
    args: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    inside: str | None
    """The path of the linear module that it is part of, or `the attention of layer ...`."""


class Trace(Protocol):
    """A trace of a run. No tensor is freed before its end, so an address stands for a storage."""

    def attended(self, layer: int, rows: Rows, output: torch.Tensor) -> None:
        """A layer's attention has read rows, and returned `[B, T, H_q, D_v]`, contiguous."""

    def projected(self, path: str, call: LinearCall) -> None:
        """The linear module at a path was called."""

    def operated(self, operation: Operation) -> None:
        """An operation was done, also in attention or in a linear module."""


@torch.no_grad()
def run_on_meta(model: PreTrainedModel, name: str, trace: Trace) -> None:
    """Run a model on `meta`. Raises `ModelUnavailable` if it fails."""
    paths = {id(module): path for path, module in model.named_modules()}
    operations = _Operations(trace)

    def attention(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        operations.inside = f"the attention of layer {layer}"
        output = attend(query, key, value).contiguous()
        operations.inside = None
        trace.attended(layer, (query, key, value), output)
        return output

    def linear(module: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
        operations.inside = path = paths[id(module)]
        output = torch.nn.functional.linear(states, module.weight, module.bias)
        operations.inside = None
        trace.projected(path, LinearCall(states, output))
        return output

    # A cache returns copies of what it stores; here it returns the tensors themselves.
    uncopied = patch.object(Cache, "update", lambda self, key, value, *args, **kwargs: (key, value))
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    with (
        as_unavailable(f"{name} fails when it runs"),
        uncopied,
        patch.object(torch.nn.Linear, "forward", linear),
        intercept(model, attention),
        operations,
    ):
        decoder(model)(input_ids=tokens, use_cache=True)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Shows every operation inside its `with` block to a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.inside: str | None = None
        self._trace = trace
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        self._alive += outputs
        operation = Operation(function, args, inputs, outputs, self.inside)
        self._trace.operated(operation)
        return result


def address(tensor: torch.Tensor) -> int:
    """A number that stands for a tensor's storage, which views share."""
    number: int = tensor.untyped_storage()._cdata
    return number


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
