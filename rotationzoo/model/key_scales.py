"""The weights that scale a model's queries and keys, how they change for given factors, and whether
a model can carry an equalizer in them.

`q k` stays the same when a channel of the keys is multiplied by a factor and the same channel of
all queries that read them is divided by it. No model is known by name here: a run on `meta` traces
the weights that make the queries, keys and values of each layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.model.key_classes import with_key_classes
from rotationzoo.model.scale_trace import (
    ScaleTrace,
    Weight,
    components,
    distinct_pairs,
    trace_labels,
)
from rotationzoo.model.value_projections import find_projections


@dataclass(frozen=True)
class Scaling:
    """The factors that the rows or elements of a weight are multiplied by."""

    weight: Weight
    factors: torch.Tensor
    """`[count]`, float64."""
    offset: float
    """The model adds this to the weight before it multiplies by it."""


class KeyScales:
    """The factors of keys that a model's weights can carry.

    Each label is two nodes of a graph: its factor and the inverse of its factor. Nodes that must be
    equal are joined, and all joined nodes have the same class.
    """

    def __init__(self, run: ScaleTrace, geometry: Geometry) -> None:
        self._weights, self._offsets = run.weights, run.constraints.offsets
        values = torch.cat([labels.value.flatten() for labels in run.layers.values()]).unique()
        # Label 0 stands for everything that is not the label of a weight.
        self._pins = [
            *run.constraints.pins,
            ("its values use the same weight", values[values > 0]),
            ("no weight of a projection or a norm makes them", torch.zeros(1).long()),
        ]
        equal, opposed = list(run.constraints.ties), []
        for layer in geometry:
            query, key = run.layers[layer.index].query, run.layers[layer.index].key
            owner_key = run.layers[layer.owner].key[:, :1]
            equal += [distinct_pairs(query[:, :1], query), distinct_pairs(owner_key, key)]
            of_group = key[:, :1].repeat_interleave(layer.group, 0)
            opposed.append(distinct_pairs(query[:, :1], of_group))
        self._labels, pairs = torch.cat(equal + opposed).unique(return_inverse=True)
        count = sum(map(len, equal))
        same, inverse = 2 * pairs[:count], 2 * pairs[count:]
        inverse[:, 1] += 1
        edges = torch.cat([same, same + 1, inverse, inverse ^ 1])
        self._nodes = components(edges, 2 * len(self._labels)).view(-1, 2)
        self.classes: dict[int, torch.Tensor] = {}
        """Layer -> `[KV heads, D]`: keys with the same number must have the same factor."""
        for layer in cached_layers(geometry):
            labels = run.layers[layer.index].key[:, 0].contiguous()
            self.classes[layer.index] = self._nodes[torch.searchsorted(self._labels, labels), 0]

    def problem(self) -> tuple[int, str] | None:
        """The first layer whose keys cannot have factors, and why not; None if all can."""
        pinned = self._marked(self._classes_of(torch.cat([labels for _, labels in self._pins])))
        taken = self._of_queries()
        for layer, classes in self.classes.items():
            if pinned[classes].any():
                of_layer = self._marked(classes)
                reasons = (
                    why for why, labels in self._pins if of_layer[self._classes_of(labels)].any()
                )
                return layer, next(reasons)
            if taken[classes].any():
                return layer, "its queries or another layer use the same weights"
            taken |= self._marked(classes)
            if self._shares(classes):
                return layer, "its weights are shared by modules"
        return None

    def _of_queries(self) -> torch.Tensor:
        """Whether each class is that of a query, whose factor is the inverse of a key's."""
        keys = self._marked(torch.cat([classes.flatten() for classes in self.classes.values()]))
        return self._marked(self._nodes[keys[self._nodes[:, 0]], 1])

    def _shares(self, classes: torch.Tensor) -> bool:
        """Whether a weight with factors of these classes is a parameter of several modules."""
        scaled = self._marked(classes)[self._nodes].any(1)
        shared = (weight for weight in self._weights if weight.shared)
        return any(scaled[self._slots(weight)[0]].any() for weight in shared)

    def _classes_of(self, labels: torch.Tensor) -> torch.Tensor:
        """The classes of labels and of their inverses; unknown labels have none."""
        slots = torch.searchsorted(self._labels, labels).clamp(max=len(self._labels) - 1)
        return self._nodes[slots[self._labels[slots] == labels]]

    def _marked(self, classes: torch.Tensor) -> torch.Tensor:
        """Whether each class is among the given ones."""
        marked = torch.zeros(self._nodes.numel(), dtype=torch.bool)
        marked[classes.flatten()] = True
        return marked

    def scalings(self, factors: Mapping[int, torch.Tensor]) -> list[Scaling]:
        """How the weights change for the factors `[KV heads, D]` of each layer's keys.

        Raises `UnsupportedModel` if channels that must have the same factor do not.
        """
        of_class = torch.ones(self._nodes.numel(), dtype=torch.float64)
        for layer, classes in self.classes.items():
            wanted = factors[layer].double()
            of_class[classes] = wanted
            if not torch.equal(of_class[classes], wanted):
                raise UnsupportedModel(
                    f"the factors of layer {layer} differ between channels that share a weight",
                    hint="calibrate again, with this model",
                )
        of_label = of_class[self._nodes[:, 0]] / of_class[self._nodes[:, 1]]
        scalings = []
        for weight in self._weights:
            slots, rows = self._slots(weight)
            if (of_label[slots] != 1).any():
                changed = torch.ones(weight.count, dtype=torch.float64)
                changed[rows] = of_label[slots]
                offset = self._offsets.get(weight.first, 0.0)
                scalings.append(Scaling(weight, changed, offset))
        return scalings

    def _slots(self, weight: Weight) -> tuple[slice, torch.Tensor]:
        """Where the labels of a weight are in the sorted list, and which of its rows they are."""
        ends = torch.tensor([weight.first, weight.first + weight.count])
        begin, end = torch.searchsorted(self._labels, ends).tolist()
        return slice(begin, end), self._labels[begin:end] - weight.first


def check_values(model: PreTrainedModel, geometry: Geometry) -> str | None:
    """Why the weights of a model on `meta` cannot carry an equalizer of values, or None if they
    can: if the values of every layer may be multiplied by an invertible matrix."""
    try:
        find_projections(model, geometry, "the model")
    except UnsupportedModel as refusal:
        return str(refusal)
    return None


def with_equalizing(model: PreTrainedModel, geometry: Geometry) -> Geometry:
    """The geometry of a model on `meta`, with what equalizers need to know of every layer.

    Raises `UnsupportedModel` if the weights cannot carry an equalizer of keys: if those of any
    layer cannot be scaled exactly, or share factors in no known pattern.
    """
    scales = find_key_scales(model, geometry, "the model")
    fixed = check_values(model, geometry) is not None
    described = with_key_classes(geometry, scales.classes)
    return [replace(layer, fixed_values=fixed) for layer in described]


def find_key_scales(model: PreTrainedModel, geometry: Geometry, name: str) -> KeyScales:
    """The weights that scale the queries and keys of a model on `meta`.

    Raises `UnsupportedModel` for a layer whose keys no weight can scale exactly.
    """
    scales = KeyScales(trace_labels(model, name), geometry)
    if problem := scales.problem():
        layer, reason = problem
        raise UnsupportedModel(
            f"layer {layer} of {name} has keys that cannot be scaled exactly: {reason}"
        )
    return scales
