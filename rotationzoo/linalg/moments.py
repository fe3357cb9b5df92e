"""Additive second moments: the statistics that calibration keeps of activations.

A `Moment` holds raw float64 sums and their total weight; division comes last. So shards, GPUs and
the parts of an interrupted run merge with `+`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import pad

from rotationzoo.sides import is_metric

Statistics = dict[int, dict[str, "Moment"]]
"""Layer index -> kind -> moment. The kinds are `query`, `output`, `key`, `value`, and for
two-pass recipes `key_energy`, whose weight is not a row count and differs between heads. With
transform coding, each side has its Fisher information, whose weight counts predicted tokens."""


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
        shapes = (heads, dim, dim), (heads, dim), (heads,)
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Add rows `[H, N, D]` of any floating dtype, with optional weights `[H, N]`. In float32,
        products would put the smallest eigenvalues off by percents."""
        rows = rows.to(self.second.device, torch.float64)
        weights = None if weights is None else weights.to(rows)
        weighted = rows if weights is None else rows * weights.unsqueeze(-1)
        self.second += weighted.mT @ rows
        self.first += weighted.sum(1)
        self.weight += rows.shape[1] if weights is None else weights.sum(1)

    def to(self, device: torch.device) -> "Moment":
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
        """`[H, D]`"""
        return self.first / self.weight[:, None]


def to_raw(statistics: Statistics) -> dict[str, torch.Tensor]:
    """The sums under flat names, on the CPU, as a checkpoint stores them."""
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
    """A moment divided by its weight, as an artifact stores it. Averages merge by `count`."""

    second_moment: torch.Tensor
    """`[H, D, D]`, exactly symmetric."""
    mean: torch.Tensor | None = None
    """`[H, D]`. None for key energy, and for imported files."""
    count: torch.Tensor | None = None
    """Rows, an int64 scalar; for key energy the total weight `[H]`, for imported files None."""


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
    count = moment.weight[0].round().long().cpu()
    return Average(second, None if is_metric(kind) else moment.mean.cpu().contiguous(), count)


def sums(averages: Averages) -> Statistics:
    """Inverse of `average`, up to rounding. A missing count is 1, and a missing mean 0."""
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


def covariance(second_moment: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The covariances `[H, D, D]` of rows with the means `[H, D]`."""
    return second_moment - mean[:, :, None] * mean[:, None]


# ---- on tensor cores


RUN = 128
"""Rows added on tensor cores. With a software model of Hopper's, an eigenvalue of a trained model
of 32 M parameters was off by 1.6e-4, and with runs of 256 by 4.3e-4."""
GROUP = 8
"""Runs added in float32. In float64, copying every run would take most of the time."""

_TYPES = torch.bfloat16, torch.float16  # whose products are exact in float32
_BLOCK = 2**24  # float32 sums of runs that are held at once, unless one head has more


def on_tensor_cores(rows: torch.Tensor) -> bool:
    """Whether rows are added in runs: on a GPU, in a 16-bit dtype."""
    return rows.is_cuda and rows.dtype in _TYPES


def rows_of_heads(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """A copy `[kv_heads, N, D]` of `[B, H, T, D]`, by batch, head and position."""
    wide, places = tensor, [*tensor.stride()[:-1], tensor.shape[-1], tensor.storage_offset()]
    in_pieces = all(place * tensor.itemsize % 16 == 0 for place in places)
    # torch copies strided tensors entry by entry, and 16 bytes take no longer than two.
    if in_pieces and tensor.stride(-1) == 1:
        wide = tensor.view(torch.complex128)
    rows: torch.Tensor = wide.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 3)
    return rows.view(tensor.dtype)


def add_runs(moment: Moment, rows: torch.Tensor, run: int = RUN) -> None:
    """Add 16-bit rows `[H, N, D]` in runs of `run` rows of a head."""
    count = rows.shape[1]
    if not count:
        return
    run = min(run, count)
    group = min(GROUP, -(-count // run))
    # Zeros fill the last group, and add nothing.
    missing = -count % (run * group)
    if missing:  # `pad` copies even where it adds nothing
        rows = pad(rows, (0, 0, 0, missing))
    moment.weight += count
    in_runs = rows.unflatten(1, (-1, run))
    moment.first += in_runs.sum(2, dtype=torch.float32).sum(1, dtype=torch.float64)
    moment.second += _sum_products(rows, run, group)


def run_bytes(heads: int, rows: int, dim: int) -> int:
    """The most memory that `add_runs` takes for 16-bit rows: copies by head, and the sums of runs
    that are held at once, in float32 and, by group, in float32 and float64."""
    one_head = -(-rows // RUN) * dim**2
    held = min(heads * one_head, max(_BLOCK, one_head))
    return 2 * 2 * heads * rows * dim + 4 * held + (4 + 8) * held // GROUP


def _sum_products(rows: torch.Tensor, run: int, group: int) -> torch.Tensor:
    """The sum `[H, D, D]`, float64, of `x^T x` over rows `[H, N, D]` in whole groups of runs."""
    dim, runs = rows.shape[-1], rows.shape[1] // run
    held = max(1, _BLOCK // (runs * dim**2))
    sums = []
    for heads in rows.split(held):
        in_runs = heads.reshape(-1, run, dim)
        products = _multiply(in_runs.mT, in_runs)
        of_groups = products.view(len(heads), -1, group, dim, dim).sum(2)
        sums.append(of_groups.sum(1, dtype=torch.float64))
    return torch.cat(sums)


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Products `[B, M, N]`, float32, of bfloat16 or float16; tensor cores round only sums."""
    # NVIDIA's tensor cores multiply bfloat16 from Ampere on.
    is_nvidia = left.is_cuda and torch.version.hip is None
    if is_nvidia and torch.cuda.get_device_capability(left.device) >= (8, 0):
        product: torch.Tensor = torch.bmm(left, right, out_dtype=torch.float32)
        return product
    # Products are exact here too, even where torch may use TF32, which holds either type.
    return left.float() @ right.float()
