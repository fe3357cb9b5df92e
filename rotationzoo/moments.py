"""Additive second moments: what calibration keeps of the activations it sees.

A `Moment` holds raw float64 sums and the weight they were summed with; division comes last. Two shards, two halves of an
interrupted run or two GPUs are therefore merged by `+`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

Statistics = dict[int, dict[str, "Moment"]]
"""Layer index -> kind -> moment; the kinds are `query`, `output`, `key`, `value` and, for two-pass recipes, `key_energy`."""


@dataclass
class Moment:
    """Raw sums over rows `x` of weight `w`, one set per KV head, all float64 on one device.

    `second` `[H, D, D]` is the sum of `w x^T x`, `first` `[H, D]` the sum of `w x`, `weight` `[H]` the sum of `w`
    (the number of rows where no weights are given).
    """

    second: torch.Tensor
    first: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def zeros(cls, heads: int, dim: int, device: torch.device | str = "cpu") -> "Moment":
        shapes = (heads, dim, dim), (heads, dim), (heads,)
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Add rows `[H, N, D]` of any floating dtype, with optional weights `[H, N]`.

        The products are formed in float64: a float32 product leaves the smallest eigenvalues of a wide spectrum wrong
        by percents.
        """
        rows = rows.to(self.second.device, torch.float64)
        weighted = rows if weights is None else rows * weights.unsqueeze(-1)
        self.second += weighted.mT @ rows
        self.first += weighted.sum(1)
        self.weight += rows.shape[1] if weights is None else weights.sum(1)

    def to(self, device: torch.device) -> "Moment":
        return self if self.second.device == device else Moment(*(getattr(self, f.name).to(device) for f in fields(self)))

    def __add__(self, other: "Moment") -> "Moment":
        return Moment(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def second_moment(self) -> torch.Tensor:
        """Mean of `x^T x`, `[H, D, D]`, exactly symmetric."""
        mean = self.second / self.weight[:, None, None]
        return (mean + mean.mT) / 2

    @property
    def mean(self) -> torch.Tensor:
        """Mean row, `[H, D]`."""
        return self.first / self.weight[:, None]


def to_raw(statistics: Statistics) -> dict[str, torch.Tensor]:
    """The sums themselves under flat names, on the CPU: what a checkpoint stores, so that resuming loses no bit."""
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


def tensor_name(layer: int, kind: str) -> str:
    """What `to_tensors` calls the second moment of a kind."""
    return f"layers.{layer}." + ("value.key_energy_moment" if kind == "key_energy" else f"{kind}.second_moment")


def to_tensors(statistics: Statistics) -> dict[str, torch.Tensor]:
    """The artifact's `statistics.safetensors`: means with their counts, so that files merge by count."""
    tensors = {}
    for layer, kinds in statistics.items():
        for kind, moment in kinds.items():
            tensors[tensor_name(layer, kind)] = moment.second_moment
            if kind == "key_energy":
                tensors[f"layers.{layer}.value.key_energy"] = moment.weight
                continue
            tensors[f"layers.{layer}.{kind}.mean"] = moment.mean
            tensors[f"layers.{layer}.{kind}.count"] = moment.weight[0].round().long()
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Statistics:
    """The moments in an artifact's `statistics.safetensors`, up to a rounding. Where no count or mean is known, as of imported
    files, the weight is 1 and the first moment zero."""
    statistics: Statistics = {}
    for name, second in tensors.items():
        _, layer, kind, what = name.split(".")
        if what not in ("second_moment", "key_energy_moment"):
            continue
        prefix = f"layers.{layer}.{kind}"
        energy = what == "key_energy_moment"
        count = tensors.get(f"{prefix}.key_energy" if energy else f"{prefix}.count", torch.ones(()))
        weight = count.double().expand(second.shape[0])
        mean = None if energy else tensors.get(f"{prefix}.mean")
        first = second.new_zeros(second.shape[:2]) if mean is None else mean * weight[:, None]
        moment = Moment(second * weight[:, None, None], first, weight)
        statistics.setdefault(int(layer), {})["key_energy" if energy else kind] = moment
    return statistics
