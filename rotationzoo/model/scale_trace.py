"""A traced run that follows the labels of weights through every operation of a model on `meta`.

With every tensor it keeps the label whose factor each element would carry:

* Moving elements, and multiplying them by anything without labels, keeps their labels.
* A product with a norm's weight carries the labels of that weight.
* A sum ties the labels of its operands: they must have the same factor, as both channels of a RoPE
  pair do.
* Any other operation pins the labels that it reads: their factor must be 1.

Every row of a linear projection and every element of a norm's weight has a label, a number above 0.
It stands for the unknown factor by which that row or element is multiplied.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from rotationzoo.model.meta_run import LinearCall, Operation, Rows, address, run_on_meta


@dataclass(frozen=True)
class Weight:
    """One weight and its labels: `first`, `first + 1`, ..."""

    module: str
    """The path of its module."""
    name: str
    """Its name in the module."""
    parameter: torch.nn.Parameter
    first: int
    is_projection: bool
    """Whether it is the matrix of a linear module, with one label a row, which the bias shares. Any
    other weight has one label an element."""
    shared: bool
    """Whether it, or its bias, is a parameter of another module too."""

    @property
    def count(self) -> int:
        """The number of its labels."""
        return len(self.parameter) if self.is_projection else self.parameter.numel()

    @property
    def labels(self) -> torch.Tensor:
        """All its labels, `[count]`."""
        return torch.arange(self.first, self.first + self.count)


def label_weights(model: torch.nn.Module) -> list[Weight]:
    """The weights that may carry factors: of linear modules, and all others of one or two
    dimensions, except embeddings. A shared weight is listed once."""
    weights: dict[int, Weight] = {}
    # Tied parameters are listed once per name, so that sharing shows as a count above 1.
    uses = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    first = 1
    for path, module in model.named_modules():
        linear = isinstance(module, torch.nn.Linear)
        for name, parameter in module.named_parameters(recurse=False):
            is_bias = linear and name != "weight"
            unfit = is_bias or parameter.ndim > 2 or isinstance(module, torch.nn.Embedding)
            if unfit or id(parameter) in weights:
                continue
            together = module.parameters(recurse=False) if linear else [parameter]
            shared = any(uses[id(each)] > 1 for each in together)
            weight = Weight(path, name, parameter, first, linear, shared)
            weights[id(parameter)] = weight
            first += weight.count
    return list(weights.values())


@dataclass(frozen=True)
class AttentionLabels:
    """The labels of what one layer's attention reads."""

    query: torch.Tensor
    """`[H_q, T, D]`."""
    key: torch.Tensor
    """`[H_kv, T, D]`."""
    value: torch.Tensor
    """`[H_kv, T, D_v]`."""


@dataclass
class Constraints:
    """The demands of a traced run on the factors."""

    ties: list[torch.Tensor] = field(default_factory=list)
    """Pairs of labels `[n, 2]` with equal factors."""
    pins: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Labels `[n]` whose factor must be 1, and the operation that demands it."""
    bent: list[torch.Tensor] = field(default_factory=list)
    """Labels of rows that were multiplied by a tensor or added to another row: a factor comes
    through that, but a matrix that mixes rows does not."""
    offsets: dict[int, float] = field(default_factory=dict)
    """First label of a norm's weight -> what the model adds to the weight before it multiplies by
    it: 1 in norms that multiply by `1 + weight`."""

    def tie(self, labels: torch.Tensor, others: torch.Tensor) -> None:
        """Demand equal factors of two tensors of labels with the same shape."""
        self.ties.append(distinct_pairs(labels, others))

    def pin(self, labels: torch.Tensor, reason: str) -> None:
        """Demand factors of 1."""
        unique = labels.unique()
        self.pins.append((reason, unique[unique > 0]))


def distinct_pairs(labels: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The distinct pairs `[n, 2]` of two tensors of labels that broadcast."""
    # One number a pair: sorting rows is far slower. Labels are below 2^31.
    both = ((labels << 32) + others).unique()
    return torch.stack([both >> 32, both & 0xFFFFFFFF], 1)


def components(edges: torch.Tensor, count: int) -> torch.Tensor:
    """The smallest node in the connected component of each of `count` nodes: `[count]`.

    `edges`: pairs of nodes, `[n, 2]`.
    """
    roots = torch.arange(count)
    ends = torch.cat([edges, edges.flip(1)])
    while True:
        smaller = roots.scatter_reduce(0, ends[:, 0], roots[ends[:, 1]], "amin")
        smaller = smaller[smaller]  # twice as far each time
        if torch.equal(smaller, roots):
            return roots
        roots = smaller


_COPIES = ("clone", "_to_copy", "_unsafe_view")
_MOVES = ("cat", "stack", "repeat", "flip", "roll")


@dataclass(frozen=True)
class _Shadow:
    """The labels of one storage."""

    labels: torch.Tensor
    """One for each element of the storage; 0 for an element without a label."""
    weight: Weight | None = None
    """The weight that the storage holds, or a copy of it plus `offset`. None for activations."""
    offset: float = 0.0


def trace_labels(model: PreTrainedModel, name: str) -> "ScaleTrace":
    """Run a model on `meta`. Raises `ModelUnavailable` if it fails."""
    trace = ScaleTrace(label_weights(model))
    run_on_meta(model, name, trace)
    return trace


class ScaleTrace:
    """Follows labels through every operation of a run: a `meta_run.Trace`."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weights = weights
        self.constraints = Constraints()
        self.layers: dict[int, AttentionLabels] = {}
        self._weights = {address(weight.parameter): weight for weight in weights}
        self._module = ""  # the path of the one that is running
        self._shadows: dict[tuple[int, bool], _Shadow] = {}
        self._rules: dict[str, Callable[..., bool]] = {
            **dict.fromkeys(_COPIES, self._copy),
            **dict.fromkeys(_MOVES, self._move),
            **dict.fromkeys(("mul", "div", "neg"), self._multiply),
            **dict.fromkeys(("add", "sub"), self._add),
            **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), self._normalize),
            "copy": self._copy_into,
        }

    def labels(self, tensor: torch.Tensor) -> torch.Tensor:
        """The labels of a tensor's elements, in its shape."""
        shadow = self._shadow(tensor)
        if shadow is None:
            return torch.zeros((), dtype=torch.long).expand(tensor.shape)
        return shadow.labels.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def attended(self, layer: int, rows: Rows, output: torch.Tensor) -> None:
        """Keep the labels of what attention read. Its output has none."""
        self.layers[layer] = AttentionLabels(*(self.labels(each)[0] for each in rows))

    def projected(self, path: str, call: LinearCall) -> None:
        """Label the output of a linear module with the module's rows."""
        self._module = path
        self.pin([call.states], "a projection")
        self._write(call.output, self._weights[address(call.module.weight)].labels)

    def operated(self, operation: Operation) -> None:
        """Label what an operation outside attention and linear modules returned."""
        function, inputs, outputs = operation.function, operation.inputs, operation.outputs
        if operation.inside is not None:
            return
        self._module = operation.module
        for weight in (self._weights.get(address(tensor)) for tensor in inputs):
            if weight is not None and weight.is_projection:  # used outside its module
                self._constrain(weight.labels, f"{function} of its weight")
        if not any(map(self._shadow, inputs)):
            return
        is_view = set(map(address, inputs)) & set(map(address, outputs))
        if not is_view or function._schema.is_mutable:
            self._follow(function, operation.args, inputs, outputs)
        elif outputs[0].is_complex() != inputs[0].is_complex():
            self._view_complex(inputs[0], outputs[0])
        elif outputs[0].dtype != inputs[0].dtype:  # the same bits as other numbers
            self.pin(inputs, str(function))

    def _follow(
        self, function: Any, args: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Label the new or changed tensors that one operation returned."""
        name = function._schema.name.removeprefix("aten::")
        if function._schema.is_mutable:
            name = name.removesuffix("_")
        rule = self._rules.get(name)
        if rule is not None and rule(function, args, outputs[0]):
            return
        self.pin(inputs, str(function))
        # A pinned label means the same as none, but tells later why.
        for output in outputs:
            same = [tensor for tensor in inputs if tensor.shape == output.shape]
            for tensor in same[:1]:
                self._write(output, self.labels(tensor))

    # Each rule labels the output of one kind of operation. It returns False where it does not hold,
    # and the inputs are then pinned.

    def _copy(self, function: Any, args: Any, output: torch.Tensor) -> bool:
        if not output.is_floating_point() and not output.is_complex():
            return False  # rounded to integers
        self._write(output, self.labels(args[0]), self._shadow(args[0]))
        return True

    def _copy_into(self, function: Any, args: Any, output: torch.Tensor) -> bool:
        self._write(output, self.labels(args[1]))
        return True

    def _move(self, function: Any, args: Any, output: torch.Tensor) -> bool:
        def labels(leaf: Any) -> Any:
            return self.labels(leaf) if isinstance(leaf, torch.Tensor) else leaf

        self._write(output, function(*tree_map(labels, args)))
        return True

    def _multiply(self, function: Any, args: Any, output: torch.Tensor) -> bool:
        """Also for quotients and for a change of sign."""
        factors = [factor for factor in args[:2] if isinstance(factor, torch.Tensor)]
        labelled = [factor for factor in factors if self._shadow(factor)]
        divides = function._schema.name.startswith("aten::div")
        if divides and (labelled[-1] is not args[0] or len(labelled) > 1):
            return False
        weights = [factor for factor in labelled if self._weight(factor)]
        # Of a weight and an activation with labels, the weight is what can be scaled.
        chosen = weights if len(labelled) > 1 else labelled
        if len(chosen) != 1 or (weights and len(factors) == 1):
            return False
        self.pin([factor for factor in labelled if factor is not chosen[0]], str(function))
        if weights:
            self._use(weights[0], str(function))
        if len(factors) > 1:
            self.constraints.bent.append(self.labels(chosen[0]).unique())
        self._write(output, self.labels(chosen[0]))
        return True

    def _add(self, function: Any, args: Any, output: torch.Tensor) -> bool:
        first, second = args[:2]
        if not isinstance(second, torch.Tensor):
            shadow = self._shadow(first)
            plain = shadow is not None and shadow.weight is not None and shadow.offset == 0
            if not plain or function is not torch.ops.aten.add.Tensor:
                return False
            assert shadow is not None
            shifted = _Shadow(shadow.labels, shadow.weight, float(second))
            self._write(output, self.labels(first), shifted)
            return True
        for part in (first, second):
            if self._weight(part):
                self._use(part, str(function))
        pair = torch.stack([self.labels(part).expand(output.shape) for part in (first, second)])
        both = (pair > 0).all(0)
        self.constraints.tie(pair[0][both], pair[1][both])
        self.constraints.bent.append(pair.unique())
        self._constrain(pair[:, ~both], str(function))
        self._write(output, pair.amax(0))
        return True

    def _normalize(self, function: Any, args: Any, output: torch.Tensor) -> bool:
        """A norm in one operation, of rows, with a weight and perhaps a bias."""
        rows, _, *parameters = args[:4]
        given = [part for part in parameters if isinstance(part, torch.Tensor)]
        if not given or not all(map(self._weight, given)):
            return False
        self.pin([rows], str(function))
        for part in given:
            self._use(part, str(function))
            self.constraints.tie(self.labels(given[0]), self.labels(part))
        self._write(output, self.labels(given[0]))
        return True

    def _view_complex(self, tensor: torch.Tensor, view: torch.Tensor) -> None:
        """Label a view of pairs as complex numbers, or of complex numbers as pairs."""
        shadow = self._shadow(tensor)
        assert shadow is not None
        if view.is_complex():
            pairs = shadow.labels.view(-1, 2)
            self.constraints.tie(pairs[:, 0], pairs[:, 1])
            self.constraints.bent.append(pairs.unique())
            labels = pairs[:, 0].contiguous()
        else:
            labels = shadow.labels.repeat_interleave(2)
        self._shadows[address(view), view.is_complex()] = _Shadow(labels)

    def _use(self, factor: torch.Tensor, operation: str) -> None:
        """Note that the model multiplies by a weight."""
        shadow, weight = self._shadow(factor), self._weight(factor)
        assert shadow is not None
        assert weight is not None
        if self.constraints.offsets.setdefault(weight.first, shadow.offset) != shadow.offset:
            self._constrain(weight.labels, f"another {operation} of its weight")

    def _weight(self, tensor: torch.Tensor) -> Weight | None:
        shadow = self._shadow(tensor)
        return None if shadow is None else shadow.weight

    def _shadow(self, tensor: torch.Tensor) -> _Shadow | None:
        key = address(tensor), tensor.is_complex()
        weight = self._weights.get(key[0])
        if key not in self._shadows and weight is not None and not weight.is_projection:
            self._shadows[key] = _Shadow(weight.labels, weight)
        return self._shadows.get(key)

    def _write(
        self, tensor: torch.Tensor, labels: torch.Tensor, like: _Shadow | None = None
    ) -> None:
        """Label a tensor's elements. `like` says what its storage holds if it is new."""
        key = address(tensor), tensor.is_complex()
        if key not in self._shadows:
            count = tensor.untyped_storage().nbytes() // tensor.itemsize
            weight, offset = (like.weight, like.offset) if like else (None, 0.0)
            self._shadows[key] = _Shadow(torch.zeros(count, dtype=torch.long), weight, offset)
        self.labels(tensor).copy_(labels.expand(tensor.shape))

    def pin(self, tensors: list[torch.Tensor], operation: str) -> None:
        """Demand factors of 1 for all labels of some tensors, which an operation reads."""
        for tensor in tensors:
            if self._shadow(tensor):
                self._constrain(self.labels(tensor), operation)

    def _constrain(self, labels: torch.Tensor, operation: str) -> None:
        self.constraints.pin(labels, f"{operation} in {self._module}")
