"""Labels of the weights that may carry factors, and what a model demands of these factors.

Every row of a linear projection and every element of a norm's weight has a label, a number above 0.
It stands for the unknown factor by which that row or element is multiplied.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch


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
    """Whether it, or the bias beside it, is a parameter of another module too."""

    @property
    def count(self) -> int:
        """The number of its labels."""
        return len(self.parameter) if self.is_projection else self.parameter.numel()

    @property
    def labels(self) -> torch.Tensor:
        """All its labels, `[count]`."""
        return torch.arange(self.first, self.first + self.count)


def label_weights(model: torch.nn.Module) -> list[Weight]:
    """The weights that may carry factors: those of linear modules, and all others of one or two
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
            beside = module.parameters(recurse=False) if linear else [parameter]
            shared = any(uses[id(each)] > 1 for each in beside)
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
    """What a traced run demands of the factors."""

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
