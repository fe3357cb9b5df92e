"""The weights that scale a model's queries and keys, and how they change for given factors.

`q k` stays the same when a channel of the keys is multiplied by a factor and the same channel of
all queries that read them is divided by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.model.scale_labels import Constraints, Weight, components

Calls = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> labels of the queries `[H_q, T, D]` and of the keys `[H_kv, T, D]` of its attention."""


@dataclass(frozen=True)
class Scaling:
    """The factors that the rows or elements of a weight are multiplied by."""

    weight: Weight
    factors: torch.Tensor
    """`[count]`, float64."""
    offset: float
    """What the model adds to the weight before it multiplies by it."""


class KeyScales:
    """The factors of keys that a model's weights can carry.

    Each label is two nodes of a graph: its factor and the inverse of its factor. Nodes that must be
    equal are joined, and all joined nodes have the same class.
    """

    def __init__(
        self, weights: list[Weight], constraints: Constraints, calls: Calls, geometry: Geometry
    ) -> None:
        self._weights, self._constraints = weights, constraints
        equal, opposed = list(constraints.ties), []
        for layer in geometry:
            query, key = calls[layer.index]
            owner_key = calls[layer.owner][1][:, :1]
            equal += [_pairs(query[:, :1], query), _pairs(owner_key, key)]
            opposed.append(_pairs(query[:, :1], key[:, :1].repeat_interleave(layer.group, 0)))
        self._labels, pairs = torch.cat(equal + opposed).unique(return_inverse=True)
        count = sum(map(len, equal))
        same, inverse = 2 * pairs[:count], 2 * pairs[count:]
        inverse[:, 1] += 1
        edges = torch.cat([same, same + 1, inverse, inverse ^ 1])
        self._nodes = components(edges, 2 * len(self._labels)).view(-1, 2)
        self.classes: dict[int, torch.Tensor] = {}
        """Layer -> `[KV heads, D]`: keys with the same number must have the same factor."""
        for layer in cached_layers(geometry):
            index = torch.searchsorted(self._labels, calls[layer.index][1][:, 0].contiguous())
            self.classes[layer.index] = self._nodes[index, 0]

    def problem(self, layer: int) -> str | None:
        """Why the keys of a cached layer cannot have factors, as the end of a sentence, or None."""
        classes = self.classes[layer]
        # Label 0 stands for everything that is not the label of a weight.
        unknown = "no weight of a projection or a norm makes them", torch.zeros(1).long()
        pins = [*self._constraints.pins, unknown]
        if self._meets(classes, torch.cat([labels for _, labels in pins])):
            reasons = (reason for reason, labels in pins if self._meets(classes, labels))
            return next(reasons)
        others = [other.flatten() for index, other in self.classes.items() if index != layer]
        of_keys = torch.isin(self._nodes[:, 0], classes)
        of_queries = self._nodes[of_keys, 1]
        if torch.isin(classes, torch.cat([of_queries, *others])).any():
            return "its queries or another layer use the same weights"
        shared = (weight for weight in self._weights if weight.shared)
        if any(of_keys[self._slots(weight)[0]].any() for weight in shared):
            return "its weights are shared by modules"
        return None

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
                offset = self._constraints.offsets.get(weight.first, 0.0)
                scalings.append(Scaling(weight, changed, offset))
        return scalings

    def _slots(self, weight: Weight) -> tuple[slice, torch.Tensor]:
        """Where the labels of a weight are in the sorted list, and which of its rows they are."""
        ends = torch.tensor([weight.first, weight.first + weight.count])
        begin, end = torch.searchsorted(self._labels, ends).tolist()
        return slice(begin, end), self._labels[begin:end] - weight.first

    def _meets(self, classes: torch.Tensor, labels: torch.Tensor) -> bool:
        """Whether a factor of these classes is that of one of these labels."""
        nodes = self._nodes[torch.isin(self._labels, labels)]
        return bool(torch.isin(nodes, classes).any())


def _pairs(labels: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The distinct pairs `[n, 2]` of two tensors of labels that broadcast."""
    both = torch.stack(torch.broadcast_tensors(labels, others), -1)
    pairs: torch.Tensor = both.flatten(0, -2).unique(dim=0)
    return pairs
