"""Finding each layer's value and output projection, which can absorb a value rotation.

Attention is linear in its values: it turns `v @ R` into `o @ R`, which the output projection can
undo. That holds only if nothing else reads the values or the output. The model is therefore run on
`meta`, and every operation between the two projections is traced.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel

from rotationzoo.errors import UnsupportedModel, as_unavailable
from rotationzoo.model.capture import Attention, decoder, intercept
from rotationzoo.model.fused_values import FusedValues
from rotationzoo.model.geometry import Geometry, Layer
from rotationzoo.model.label_run import trace_labels

SERVE_UNABSORBED = (
    "serve the model as it is and rotate its values on the way to the cache, with the artifact"
)
_SHARED = "a value or output projection that it shares with another module"
_TOKENS = 8  # in the traced run: any number works


class Projections(NamedTuple):
    """The linear modules before and behind a layer's attention, by their paths."""

    value: str
    output: str
    first_row: int = 0
    """Where the rows of the values begin in `value`, which may compute queries and keys as well."""


@torch.no_grad()
def find_projections(model: PreTrainedModel, geometry: Geometry, name: str) -> list[Projections]:
    """Each layer's value and output projection, in a model on `meta`.

    Raises `UnsupportedModel` for a layer with anything but attention between the two.
    """
    run = _traced_run(model, name)
    fused: FusedValues | None = None
    # Tied parameters are listed once per name, so that sharing shows as a count above 1.
    parameters = model.named_parameters(remove_duplicate=False)
    uses = Counter(id(parameter) for _, parameter in parameters)
    projections: dict[str, Projections] = {}
    for layer in geometry:
        values = run.path_of(layer.index)
        if _is_fused(model, layer, values):
            fused = fused or FusedValues(trace_labels(model, name))
            values = replace(values, fused_row=fused.first_row(layer.index, str(values.maker)))
        problem = _problem(model, layer, values, run.modules, uses)
        if problem is None and values.maker in projections:
            problem = _SHARED
        if problem is not None:
            raise UnsupportedModel(
                f"layer {layer.index} of {name} has {problem}", hint=SERVE_UNABSORBED
            )
        assert values.maker is not None
        projections[values.maker] = Projections(
            values.maker, values.output_readers[0], values.fused_row or 0
        )
    return list(projections.values())


@dataclass(frozen=True)
class _ValuePath:
    """Where the values of one layer come from and where they go.

    A reader is the path of a module, or the name of an operation.
    """

    values: torch.Tensor
    maker: str | None
    """The path of the linear module that computed the values; None if it was anything else."""
    other_readers: list[str]
    """What reads the values besides the layer's attention."""
    output_readers: list[str]
    """What reads the output of the layer's attention."""
    are_queries_or_keys: bool
    fused_row: int | None = None
    """Where the values begin among the rows of a fused projection, if they can be told apart."""


def _is_fused(model: PreTrainedModel, layer: Layer, path: _ValuePath) -> bool:
    """Whether the projection has more rows than the values need, or its output is also queries or
    keys."""
    if path.maker is None:
        return False
    rows = len(_weight(model, path.maker))
    return rows != layer.kv_heads * layer.value_dim or path.are_queries_or_keys


def _problem(
    model: PreTrainedModel, layer: Layer, path: _ValuePath, modules: set[str], uses: Counter[int]
) -> str | None:
    """Why a layer cannot absorb a rotation, in words, or None if it can.

    `modules` holds the paths of all modules. `uses` counts how often each parameter occurs in the
    model.
    """
    if layer.owner != layer.index:
        return f"no value projection of its own: it reads the cache of layer {layer.owner}"
    if path.maker is None:
        return (
            "a norm or another operation between the value projection and attention, or no value "
            "projection"
        )
    fused = _is_fused(model, layer, path)
    if fused and path.fused_row is None:
        return f"a fused value projection, {path.maker}"
    # The projection's rows must be grouped by head: the channels of a head are adjacent in memory,
    # and the heads follow one another.
    width = layer.kv_heads * layer.value_dim
    in_order = path.values.stride()[1:] == (layer.value_dim, width, 1)
    if not fused and (path.other_readers or not in_order):
        readers = ", ".join(path.other_readers) or "their order"
        return f"another use of its values than its attention, in {readers}"
    readers = ", ".join(path.output_readers)
    gated = f"a gate or a norm between attention and the output projection, {readers}"
    if len(path.output_readers) != 1 or readers not in modules:
        return gated
    value_weight, output_weight = _weight(model, path.maker), _weight(model, readers)
    if output_weight.shape[1] != layer.query_heads * layer.value_dim:
        return gated
    if uses[id(value_weight)] > 1 or uses[id(output_weight)] > 1:
        return _SHARED
    return None


def _weight(model: PreTrainedModel, module: str) -> torch.nn.Parameter:
    return model.get_parameter(f"{module}.weight")


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Records what reads each tensor: the module in `inside`, or else the operation's name.

    Views of a tensor, and its products with a number, count as the tensor itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.inside: str | None = None
        self.readers: dict[int, set[str]] = defaultdict(set)
        self._multiple_of: dict[int, int] = {}
        self._alive: list[Any] = []  # a freed tensor's address could be reused for another one

    def identity(self, tensor: torch.Tensor) -> int:
        address: int = tensor.untyped_storage()._cdata
        return self._multiple_of.get(address, address)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        self._alive += outputs
        if function is torch.ops.aten.mul.Tensor and not isinstance(args[1], torch.Tensor):
            # Scaling by a number commutes with a rotation.
            self._multiple_of[outputs[0].untyped_storage()._cdata] = self.identity(args[0])
        # Making a view does not count as reading; changing a tensor in place does.
        views = set() if function._schema.is_mutable else set(map(self.identity, outputs))
        for identity in set(map(self.identity, inputs)) - views:
            self.readers[identity].add(self.inside or str(function))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass
class _Run:
    """One traced forward pass."""

    modules: set[str]
    """The paths of all modules."""
    trace: _Trace = field(default_factory=_Trace)
    calls: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Layer -> query, key, value and output of its attention."""
    makers: dict[int, str] = field(default_factory=dict)
    """Identity of a tensor -> the path of the linear module that computed it."""

    def path_of(self, layer: int) -> _ValuePath:
        query, key, value, output = self.calls[layer]
        identity = self.trace.identity
        maker = self.makers.get(identity(value))
        expected = {f"the attention of layer {layer}", maker}
        return _ValuePath(
            values=value,
            maker=maker,
            other_readers=sorted(self.trace.readers[identity(value)] - expected),
            output_readers=sorted(self.trace.readers[identity(output)]),
            are_queries_or_keys=identity(value) in (identity(query), identity(key)),
        )


def _traced_run(model: PreTrainedModel, name: str) -> _Run:
    paths = {id(module): path for path, module in model.named_modules()}
    run = _Run(set(paths.values()))
    trace = run.trace

    def attention(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        trace.inside = f"the attention of layer {layer}"
        output = attend(query, key, value).contiguous()
        trace.inside, run.calls[layer] = None, (query, key, value, output)
        return output

    def linear(module: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
        trace.inside = paths[id(module)]
        output = torch.nn.functional.linear(states, module.weight, module.bias)
        trace.inside, run.makers[trace.identity(output)] = None, paths[id(module)]
        return output

    # A cache returns copies of what it stores. This patch returns the tensors themselves, so that
    # they can still be identified by address.
    uncopied = patch.object(Cache, "update", lambda self, key, value, *args, **kwargs: (key, value))
    named_linear = patch.object(torch.nn.Linear, "forward", linear)
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    with (
        as_unavailable(f"{name} fails when it runs"),
        uncopied,
        named_linear,
        intercept(model, attention),
        trace,
    ):
        decoder(model)(input_ids=tokens, use_cache=True)
    return run
