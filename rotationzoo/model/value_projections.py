"""Finding each layer's value and output projection, which can absorb a value rotation.

Attention is linear in its values: it turns `v @ R` into `o @ R`, which the output projection can
undo. That holds only if nothing else reads the values or the output. The model is therefore run on
`meta`, and every operation between the two projections is traced. Where one projection computes
more than values, the rows of the values are found.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.geometry import Geometry, Layer
from rotationzoo.model.meta_run import LinearCall, Operation, Rows, address, run_on_meta

SERVE_UNABSORBED = (
    "serve the model as it is and rotate its values on the way to the cache, with the artifact"
)
_SHARED = "a value or output projection that it shares with another module"


class Projections(NamedTuple):
    """The linear modules before and behind a layer's attention, by their paths."""

    value: str
    output: str
    first_row: int = 0
    """Where the rows of the values begin in `value`, which may compute queries and keys as well."""


def find_projections(model: PreTrainedModel, geometry: Geometry, name: str) -> list[Projections]:
    """Each layer's value and output projection, in a model on `meta`.

    Raises `UnsupportedModel` for a layer with anything but attention between the two.
    """
    trace = _ReaderTrace()
    run_on_meta(model, name, trace)
    modules = {path for path, _ in model.named_modules()}
    fused: _RowTrace | None = None
    # Tied parameters are listed once per name, so that sharing shows as a count above 1.
    parameters = model.named_parameters(remove_duplicate=False)
    uses = Counter(id(parameter) for _, parameter in parameters)
    projections: dict[str, Projections] = {}
    for layer in geometry:
        values = trace.path_of(layer.index)
        if _is_fused(model, layer, values):
            if fused is None:
                fused = _RowTrace()
                run_on_meta(model, name, fused)
            values = replace(values, fused_row=fused.first_row(layer.index, str(values.maker)))
        problem = _problem(model, layer, values, modules, uses)
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
    """Modules that read the values besides the layer's attention."""
    output_readers: list[str]
    """Modules that read the output of the layer's attention."""
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


class _ReaderTrace:
    """Records what reads each tensor of a run: a `meta_run.Trace`. A reader is a linear module, a
    layer's attention, or else an operation, by its name.

    Views of a tensor, and its products with a number, count as the tensor itself.
    """

    def __init__(self) -> None:
        self._readers: dict[int, set[str]] = defaultdict(set)
        self._multiple_of: dict[int, int] = {}
        self._calls: dict[int, tuple[torch.Tensor, ...]] = {}  # query, key, value and output
        self._makers: dict[int, str] = {}  # identity of a tensor -> the linear module behind it

    def attended(self, layer: int, rows: Rows, output: torch.Tensor) -> None:
        self._calls[layer] = (*rows, output)

    def projected(self, path: str, call: LinearCall) -> None:
        self._makers[self._identity(call.output)] = path

    def operated(self, operation: Operation) -> None:
        function, args, outputs = operation.function, operation.args, operation.outputs
        if function is torch.ops.aten.mul.Tensor and not isinstance(args[1], torch.Tensor):
            # Scaling by a number commutes with a rotation.
            self._multiple_of[address(outputs[0])] = self._identity(args[0])
        # Making a view does not count as reading; changing a tensor in place does.
        mutable = function._schema.is_mutable
        views = set() if mutable else set(map(self._identity, outputs))
        for identity in set(map(self._identity, operation.inputs)) - views:
            self._readers[identity].add(operation.inside or str(function))

    def path_of(self, layer: int) -> _ValuePath:
        """Where the values of a layer came from and went, after the run."""
        query, key, value, output = map(self._identity, self._calls[layer])
        maker = self._makers.get(value)
        expected = {f"the attention of layer {layer}", maker}
        return _ValuePath(
            values=self._calls[layer][2],
            maker=maker,
            other_readers=sorted(self._readers[value] - expected),
            output_readers=sorted(self._readers[output]),
            are_queries_or_keys=value in (query, key),
        )

    def _identity(self, tensor: torch.Tensor) -> int:
        return self._multiple_of.get(address(tensor), address(tensor))


# Operations that move numbers and leave them as they are.
_COPIES = ("clone", "_to_copy", "_unsafe_view")
_MOVES = ("cat", "stack", "repeat", "flip", "roll")


class _RowTrace:
    """Follows every row of every linear projection to the attention that reads it: a
    `meta_run.Trace`.

    Each row has a label, a number above 0. Moving elements, and multiplying them by a number, keeps
    their labels. Any other operation uses the labels that it reads.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}  # module -> the label of its first row
        self._rows = 0
        self._shadows: dict[int, torch.Tensor] = {}  # storage -> a label for each of its elements
        self._used: list[torch.Tensor] = []
        self._values: dict[int, torch.Tensor] = {}  # layer -> labels `[H_kv, T, D_v]`

    def first_row(self, layer: int, module: str) -> int | None:
        """The first row of a layer's values in a module. The others follow it, head by head.

        None if a layer's values are not such rows, or if anything but its attention reads them: a
        matrix that mixes the channels of each head could then not be folded into the rows.
        """
        labels = self._values[layer]
        rows = labels[:, 0].flatten()
        in_order = torch.equal(rows, torch.arange(len(rows)) + rows[0])
        if not in_order or not torch.equal(labels, labels[:, :1].expand_as(labels)):
            return None
        of_all_layers = torch.cat([each[:, 0].flatten() for each in self._values.values()])
        shared = torch.isin(of_all_layers, rows).sum() != len(rows)
        if shared or torch.isin(rows, torch.cat(self._used)).any():
            return None
        return int(rows[0]) - self._first[module]

    def attended(self, layer: int, rows: Rows, output: torch.Tensor) -> None:
        """Keep the labels of the values. The output has none."""
        query, key, value = (self._labels(each)[0] for each in rows)
        self._used += [query.unique(), key.unique()]
        self._values[layer] = value

    def projected(self, path: str, call: LinearCall) -> None:
        """Label the output of a linear module with the module's rows."""
        self._use([call.states])
        count = call.output.shape[-1]
        if path not in self._first:
            self._first[path] = self._rows + 1
            self._rows += count
        first = self._first[path]
        self._write(call.output, torch.arange(first, first + count))

    def operated(self, operation: Operation) -> None:
        """Label what an operation outside attention and linear modules returned."""
        function, args, inputs = operation.function, operation.args, operation.inputs
        labelled = any(address(tensor) in self._shadows for tensor in inputs)
        if operation.inside is not None or not labelled:
            return
        output = operation.outputs[0]
        name = function._schema.name.removeprefix("aten::")
        is_mutable = function._schema.is_mutable
        is_view = address(output) in set(map(address, inputs)) and not is_mutable
        if is_view and output.dtype == inputs[0].dtype:
            return  # it has the labels of its storage
        by_number = name in ("mul", "div") and not isinstance(args[1], torch.Tensor)
        if by_number or (name in _COPIES and output.is_floating_point()):
            self._write(output, self._labels(args[0]))
        elif name == "copy_":
            self._write(output, self._labels(args[1]))
        elif name in _MOVES:
            self._write(output, function(*tree_map(self._labels_of, args)))
        else:
            self._use(inputs)

    def _labels_of(self, leaf: Any) -> Any:
        return self._labels(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _labels(self, tensor: torch.Tensor) -> torch.Tensor:
        """The labels of a tensor's elements, in its shape; 0 for an element without a label."""
        shadow = self._shadows.get(address(tensor))
        if shadow is None:
            return torch.zeros((), dtype=torch.long).expand(tensor.shape)
        return shadow.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _use(self, tensors: list[torch.Tensor]) -> None:
        self._used += [self._labels(tensor).unique() for tensor in tensors]

    def _write(self, tensor: torch.Tensor, labels: torch.Tensor) -> None:
        """Label a tensor's elements."""
        count = tensor.untyped_storage().nbytes() // tensor.itemsize
        self._shadows.setdefault(address(tensor), torch.zeros(count, dtype=torch.long))
        self._labels(tensor).copy_(labels.expand(tensor.shape))
