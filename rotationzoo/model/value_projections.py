"""Finding each layer's value and output projection, which can absorb a value rotation.

Attention is linear in its values: it turns `v @ R` into `o @ R`, which the output projection can
undo. That holds only if nothing else reads the values or the output. The model is therefore run on
`meta`, and every operation between the two projections is traced. A projection that computes more
than values is refused.
"""

from collections import Counter, defaultdict
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel

from rotationzoo.errors import UnsupportedModel, as_unavailable
from rotationzoo.geometry import Geometry, Layer
from rotationzoo.model.capture import Call, decoder, intercept

SERVE_UNABSORBED = "serve the model as it is, and let the engine rotate, with the artifact"
_SHARED = "a value or output projection that it shares with another module"
_TOKENS = 2  # more than 1, so that what differs by token shows


class Projections(NamedTuple):
    """The linear modules before and behind a layer's attention, by their paths."""

    value: str
    output: str


def find_projections(model: PreTrainedModel, geometry: Geometry, name: str) -> list[Projections]:
    """Each layer's value and output projection, in a model on `meta`.

    Raises `UnsupportedModel` for a layer with anything but attention between the two.
    """
    trace = _run_on_meta(model, name)
    modules = {path for path, _ in model.named_modules()}
    # Tied parameters are listed once per name, so that sharing shows as a count above 1.
    parameters = model.named_parameters(remove_duplicate=False)
    uses = Counter(id(parameter) for _, parameter in parameters)
    projections: dict[str, Projections] = {}
    for layer in geometry:
        found = _find_pair(model, layer, trace, modules, uses)
        if isinstance(found, Projections) and found.value in projections:
            found = _SHARED
        if isinstance(found, str):
            raise UnsupportedModel(
                f"layer {layer.index} of {name} has {found}", hint=SERVE_UNABSORBED
            )
        projections[found.value] = found
    return list(projections.values())


def _find_pair(
    model: PreTrainedModel,
    layer: Layer,
    trace: "_ReaderTrace",
    modules: set[str],
    uses: Counter[int],
) -> Projections | str:
    """The projections of a layer, or why it cannot absorb a rotation, in words. There are the paths
    of all `modules`, and how often each parameter occurs in the model."""
    if layer.owner != layer.index:
        return f"no value projection of its own: it reads the cache of layer {layer.owner}"
    query, key, value, output = map(_identity, trace.calls[layer.index])
    maker = trace.makers.get(value)
    if maker is None:
        return (
            "a norm or another operation between the value projection and attention, or no value "
            "projection"
        )
    value_weight = model.get_parameter(f"{maker}.weight")
    width = layer.kv_heads * layer.value_dim
    if len(value_weight) != width or value in (query, key):
        return f"a fused value projection, {maker}"
    # The projection's rows must be grouped by head: the channels of a head are adjacent in memory,
    # and the heads follow one another.
    in_order = trace.calls[layer.index][2].stride()[1:] == (layer.value_dim, width, 1)
    others = trace.readers[value] - {f"the attention of layer {layer.index}", maker}
    if others or not in_order:
        readers = ", ".join(sorted(others)) or "their order"
        return f"another use of its values than its attention, in {readers}"
    readers = ", ".join(sorted(trace.readers[output]))
    gated = f"a gate or a norm between attention and the output projection, {readers}"
    if len(trace.readers[output]) != 1 or readers not in modules:
        return gated
    output_weight = model.get_parameter(f"{readers}.weight")
    if output_weight.shape[1] != layer.query_heads * layer.value_dim:
        return gated
    if uses[id(value_weight)] > 1 or uses[id(output_weight)] > 1:
        return _SHARED
    return Projections(maker, readers)


@torch.no_grad()
def _run_on_meta(model: PreTrainedModel, name: str) -> "_ReaderTrace":
    """The trace of a run of a model on `meta`. Raises `ModelUnavailable` if it fails."""
    paths = {id(module): path for path, module in model.named_modules()}
    trace = _ReaderTrace()

    def attention(call: Call) -> torch.Tensor:
        trace.inside = f"the attention of layer {call.layer}"
        output = call.run().contiguous()
        trace.inside = None
        trace.calls[call.layer] = call.query, call.key, call.value, output
        return output

    def linear(module: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
        trace.inside = path = paths[id(module)]
        output = torch.nn.functional.linear(states, module.weight, module.bias)
        trace.inside = None
        trace.makers[_identity(output)] = path
        return output

    # A cache returns copies of what it stores; here it returns the tensors themselves.
    uncopied = patch.object(Cache, "update", lambda self, key, value, *args, **kwargs: (key, value))
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    with (
        as_unavailable(f"{name} fails when it runs"),
        uncopied,
        patch.object(torch.nn.Linear, "forward", linear),
        intercept(model, attention),
        trace,
    ):
        decoder(model)(input_ids=tokens, use_cache=True)
    return trace


class _ReaderTrace(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Records what reads each tensor inside its `with` block. A reader is a linear module, a
    layer's attention, or else an operation, by its name.

    Views of a tensor count as the tensor itself. No tensor is freed before the end, so an address
    stands for a storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.inside: str | None = None
        """The linear module or the attention that is running."""
        self.calls: dict[int, tuple[torch.Tensor, ...]] = {}
        """Layer -> query, key and value of its attention, and the output."""
        self.makers: dict[int, str] = {}
        """Identity of a tensor -> the linear module that computed it."""
        self.readers: dict[int, set[str]] = defaultdict(set)
        """Identity of a tensor -> what reads it."""
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        self._alive += outputs
        # Making a view does not count as reading; changing a tensor in place does.
        views = set() if function._schema.is_mutable else set(map(_identity, outputs))
        for identity in set(map(_identity, inputs)) - views:
            self.readers[identity].add(self.inside or str(function))
        return result


def _identity(tensor: torch.Tensor) -> int:
    """A number that stands for a tensor and its views."""
    number: int = tensor.untyped_storage()._cdata
    return number


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
