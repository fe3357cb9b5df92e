"""Additive second moments: the statistics that calibration keeps of activations.

A `Moment` holds raw float64 sums and their total weight; division comes last. Two shards, two GPUs
or the two halves of an interrupted run therefore merge with `+`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

Statistics = dict[int, dict[str, "Moment"]]
"""Layer index -> kind -> moment. The kinds are `query`, `output`, `key`, `value`, and for
two-pass recipes `key_energy`, whose weight is no row count and differs from head to head."""


@dataclass
class Moment:
    """Raw sums over rows `x` of weight `w`, one set per KV head, all float64 on one device.

    * `second` `[H, D, D]` is the sum of `w x^T x`;
    * `first` `[H, D]` is the sum of `w x`;
    * `weight` `[H]` is the sum of `w`: the number of rows where no weights are given.
    """

    second: torch.Tensor
    first: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def zeros(cls, heads: int, dim: int, device: torch.device | str = "cpu") -> "Moment":
        """The moment of zero rows."""
        shapes = (heads, dim, dim), (heads, dim), (heads,)
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Add rows `[H, N, D]` of any floating dtype, with optional weights `[H, N]`.

        The products are formed in float64. Float32 products leave the smallest eigenvalues of a
        wide spectrum wrong by percents.
        """
        rows = rows.to(self.second.device, torch.float64)
        weights = None if weights is None else weights.to(rows)
        weighted = rows if weights is None else rows * weights.unsqueeze(-1)
        self.second += weighted.mT @ rows
        self.first += weighted.sum(1)
        self.weight += rows.shape[1] if weights is None else weights.sum(1)

    def to(self, device: torch.device) -> "Moment":
        """The same sums on another device."""
        if self.second.device == device:
            return self
        return Moment(self.second.to(device), self.first.to(device), self.weight.to(device))

    def __add__(self, other: "Moment") -> "Moment":
        return Moment(
            self.second + other.second, self.first + other.first, self.weight + other.weight
        )

    @property
    def second_moment(self) -> torch.Tensor:
        """Mean of `x^T x`, `[H, D, D]`, exactly symmetric."""
        mean = self.second / self.weight[:, None, None]
        return (mean + mean.mT) / 2  # rounding differs between the triangles of a product

    @property
    def mean(self) -> torch.Tensor:
        """Mean row, `[H, D]`."""
        return self.first / self.weight[:, None]


def to_raw(statistics: Statistics) -> dict[str, torch.Tensor]:
    """The sums themselves under flat names, on the CPU. A checkpoint stores these, so that resuming
    loses no bit."""
    return {
        f"{layer}.{kind}.{field.name}": getattr(moment, field.name).cpu().contiguous()
        for layer, kinds in statistics.items()
        for kind, moment in kinds.items()
        for field in fields(moment)
    }


def from_raw(tensors: Mapping[str, torch.Tensor]) -> Statistics:
    """Inverse of `to_raw`."""
    statistics: Statistics = {}
    for name in tensors:
        layer, kind, field = name.split(".")
        if field == "second":
            sums = (tensors[f"{layer}.{kind}.{f.name}"].clone() for f in fields(Moment))
            statistics.setdefault(int(layer), {})[kind] = Moment(*sums)
    return statistics


@dataclass(frozen=True)
class Average:
    """A moment divided by its weight, which is what an artifact stores. Averages of several files
    merge by `count`."""

    second_moment: torch.Tensor
    """`[H, D, D]`, exactly symmetric."""
    mean: torch.Tensor | None = None
    """`[H, D]`. None for key energy, and for imported files."""
    count: torch.Tensor | None = None
    """Number of rows, an int64 scalar. For key energy it is the total weight `[H]`; for
    imported files it is None."""


Averages = dict[int, dict[str, Average]]
"""Layer index -> kind -> average, with the kinds of `Statistics`."""


def average(statistics: Statistics) -> Averages:
    """Every moment divided by its weight, on the CPU."""
    averages: Averages = {}
    for layer, kinds in statistics.items():
        averages[layer] = {kind: _average(kind, moment) for kind, moment in kinds.items()}
    return averages


def _average(kind: str, moment: Moment) -> Average:
    second = moment.second_moment.cpu().contiguous()
    if kind == "key_energy":
        return Average(second, None, moment.weight.cpu().contiguous())
    # All heads have seen the same rows, so one head's weight is the count.
    return Average(second, moment.mean.cpu().contiguous(), moment.weight[0].round().long().cpu())


def sums(averages: Averages) -> Statistics:
    """Inverse of `average`, up to rounding. The weight is 1 where the count is unknown, and the
    first moment is 0 where the mean is unknown."""
    statistics: Statistics = {}
    for layer, kinds in averages.items():
        statistics[layer] = {kind: _sums(average) for kind, average in kinds.items()}
    return statistics


def _sums(average: Average) -> Moment:
    second, mean = average.second_moment, average.mean
    count = torch.ones(()) if average.count is None else average.count
    weight = count.double().expand(len(second))
    first = second.new_zeros(second.shape[:2]) if mean is None else mean * weight[:, None]
    return Moment(second * weight[:, None, None], first, weight)
