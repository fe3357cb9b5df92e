"""Estimates the memory and disk of a calibration, and reads those of this machine.

Each term counts tensors that exist at the same time. The tests compare them with allocations.

With weights spread over devices, a pass gets as many rows as fit, since each fetches them again.
"""

import os
import platform
import resource
import sys
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from rotationzoo.artifact.layout import matrix_count, statistic_dims
from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.linalg.moments import run_bytes
from rotationzoo.model import placement
from rotationzoo.model.long_masks import BLOCK_QUERIES, LARGEST_MASK
from rotationzoo.model.placement import USABLE, Limits, devices_of, free_memory, sum_entries
from rotationzoo.recipe import Recipe

_STATUS = Path("/proc/self/status")


def total_memory(on_cpu: bool, spread: bool) -> int:
    """Bytes of memory where a job runs: main memory, the GPU's, or both for `spread` weights."""
    main = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    main = min([main, *(limit for limit, _ in placement.container_limits())])
    if not torch.cuda.is_available() or (on_cpu and not spread):
        return main
    devices = range(torch.cuda.device_count())
    sizes = [torch.cuda.get_device_properties(device).total_memory for device in devices]
    return main + sum(sizes) if spread else sizes[torch.cuda.current_device()]


def peak_memory() -> int:
    """The process's peak memory in bytes: on all CUDA devices if it used them, else resident."""
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        on_devices = sum(torch.cuda.max_memory_allocated(device) for device in devices)
        if on_devices:
            return on_devices
    if kilobytes := sum_entries(_STATUS, "VmHWM:"):  # which only Linux has
        return 1024 * kilobytes
    # Where the process that started this one was larger, this is the peak of that one.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # `ru_maxrss` is in bytes on macOS and in kilobytes on Linux.
    return resident if sys.platform == "darwin" else resident * 1024


def device_name(device: str) -> str:
    """The name that a manifest gives to the device `cuda` or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"


# torch and transformers themselves, whose memory counts on a CPU: 420 to 460 MB measured.
_LIBRARIES = 450_000_000


@dataclass(frozen=True)
class Footprint:
    """Estimated sizes of one job, in bytes."""

    recipe: Recipe
    geometry: Geometry
    config: PretrainedConfig
    batch: int
    """Rows per forward pass."""
    item: int
    """Bytes per activation element."""
    on_cpu: bool

    @property
    def statistics(self) -> int:
        """The statistics: float64 second moments."""
        if not self.recipe.needs_statistics:
            return 0
        total = 0
        for layer in cached_layers(self.geometry):
            dims = [*statistic_dims(layer, self.recipe).values()]
            if self.recipe.transform:  # the Fisher information
                dims += [layer.dims[side] for side in layer.sides]
            total += 8 * layer.kv_heads * sum(dim**2 for dim in dims)
        return total

    @property
    def rotations(self) -> int:
        """The rotations: a float32 matrix per side and head, or pooled layer; and the matrices of
        transform coding."""
        total = 0
        for layer in cached_layers(self.geometry):
            squares = sum(layer.dims[side] ** 2 for side in layer.sides)
            total += 4 * matrix_count(self.recipe, layer.kv_heads) * squares
            if self.recipe.transform:
                total += 4 * layer.kv_heads * squares
        return total

    def peak(self, weights: int) -> int:
        """Peak memory of the job, including `weights` bytes for the model."""
        libraries = _LIBRARIES if self.on_cpu else 0
        if not self.recipe.needs_statistics:
            return self.rotations + libraries
        passing = weights + self.pass_bytes(self.batch)
        # On a CPU, the allocator keeps what the passes freed.
        if self.on_cpu:
            return libraries + passing + self.rotations
        # After the passes, the sums exist together with the averages that are written.
        return max(passing, weights + 2 * self.statistics + self.rotations)

    def pass_bytes(self, batch: int) -> int:
        """Bytes of a pass over `batch` rows besides weights: activations and both sets of sums."""
        return self.activations(batch) + 2 * self.statistics

    def activations(self, batch: int) -> int:
        """Peak memory of the decoder for a batch: residuals, projections, sums and eager scores."""
        length, tokens = self.recipe.data.length, self.recipe.data.length * batch
        scores = 0
        if self._text._attn_implementation == "eager":
            heads = max((layer.query_heads for layer in self.geometry), default=0)
            whole = length * length <= LARGEST_MASK
            scores = 3 * 4 * tokens * (length if whole else BLOCK_QUERIES) * heads
        hidden: int = self._text.hidden_size
        inner = getattr(self._text, "intermediate_size", None) or 4 * hidden
        if not isinstance(inner, int):  # some models have one size per layer
            inner = max(inner)
        states: int = tokens * self.item * (4 * hidden + 3 * max(self._widest, inner))
        return states + self._adding(batch) + scores

    def _adding(self, batch: int) -> int:
        """The most memory that adding one layer's rows to the sums takes: float64 copies of one
        row of text on a CPU, and runs of a whole batch on a GPU."""
        length = self.recipe.data.length
        if self.on_cpu:
            return 2 * 8 * length * self._widest
        adding = [0]
        for layer in self.geometry:
            rows = length * batch
            for dim in (layer.key_dim, layer.value_dim):
                adding.append(run_bytes(layer.kv_heads, layer.group * rows, dim, self.item))
            if self.recipe.value_statistic == "key_energy":
                adding.append(
                    run_bytes(layer.kv_heads, rows, layer.value_dim, self.item, weighted=True)
                )
        return max(adding)

    @property
    def _widest(self) -> int:
        """The largest width of a layer's queries and outputs together."""
        widths = (layer.query_heads * (layer.key_dim + layer.value_dim) for layer in self.geometry)
        return max(widths, default=0)

    @property
    def _text(self) -> PretrainedConfig:
        return self.config.get_text_config(decoder=True)


SIZED = 0
"""The batch of a job that leaves the number of rows to `choose_batch`."""


def choose_batch(needs: Footprint, weights: int, limits: Limits | None) -> int:
    """The rows of a pass: all of them if their activations fit, else even parts, as few as fit.

    Of the bytes of all `weights`, each device may hold its limit. Without limits, `placement` keeps
    weights off a device for the activations, which get half of what is free there.
    """
    rooms = []
    for device in devices_of(on_cpu=needs.on_cpu):
        usable = int(USABLE * free_memory(device))
        if limits is None:
            rooms.append(max(usable - weights, usable // 2))
        else:
            rooms.append(usable - min(weights, limits.get(device, 0)))
    # Of the longest kind; of documents of unknown lengths, at most as many as would be that long.
    rows = max(1, needs.recipe.data.tokens // needs.recipe.data.length)
    fitting = bisect_right(range(1, rows + 1), min(rooms), key=needs.pass_bytes)
    passes = -(-rows // max(fitting, 1))
    return -(-rows // passes)
