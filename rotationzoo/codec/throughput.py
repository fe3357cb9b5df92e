"""Throughput of the CUDA kernels in bytes per second, next to a device copy in the same run."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rotationzoo.codec.clip import clip_position
from rotationzoo.codec.cuda import Packed, Variant, compiled, empty_packed, unset_flag
from rotationzoo.codec.formats import SGLANG, Format

_REPEATS = 20
_WARM_UP = 3  # uncounted launches, which pay for compiling and allocating


def measure(
    dim: int,
    group_size: int | None = None,
    clip: float = 0.96,
    format: Format = SGLANG,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 4 << 20,
) -> dict[str, object]:
    """Bytes read and written per second by a copy, and by each kernel on `rows` rows. Each figure
    is the median of repeated launches.

    A kernel's bytes are the rows, the packed codes and the metadata; reads of the rotation matrix
    are not counted. Fewer rows are used where 80 % of the free memory cannot hold them.
    """
    group = group_size or dim
    buffers = _allocate(rows, dim, group, format, dtype)
    exact, restored, rows = buffers.exact, buffers.restored, buffers.rows
    codes, metadata, refused = buffers.packed.codes, buffers.packed.metadata, buffers.refused
    rotation = torch.linalg.qr(torch.randn(1, dim, dim))[0].cuda().contiguous()
    channels = group if format.clip_scope == "group" else dim
    entry, weight = clip_position(torch.tensor([clip]), channels, format.interpolated)
    entry, weight = entry.cuda().int(), weight.cuda()

    def quantize(clips: bool, rotates: bool) -> Callable[[], None]:
        variant = Variant(dim, group, dtype, format, clips, rotates)
        kernel = compiled("quantize", variant, exact.device)
        return lambda: kernel(exact, rows, rotation, entry, weight, codes, metadata, None, refused)

    def dequantize(rotates: bool) -> Callable[[], None]:
        variant = Variant(dim, group, dtype, format, rotates=rotates)
        kernel = compiled("dequantize", variant, exact.device)
        return lambda: kernel(codes, metadata, rows, rotation, restored)

    launches = {
        "quantize": quantize(False, False),
        "quantize, clip": quantize(True, False),
        "dequantize": dequantize(False),
        "rotate, clip, quantize": quantize(True, True),
        "dequantize, rotate back": dequantize(True),
    }
    copy_rate = buffers.copy_rate()
    rates = {name: buffers.bytes / _seconds(launch) for name, launch in launches.items()}
    return {
        "quantize_bytes_per_second": rates["quantize, clip"],
        "dequantize_bytes_per_second": rates["dequantize"],
        "copy_bytes_per_second": copy_rate,
        "throughput": rates,
        "measured": {
            "head_dim": dim,
            "group_size": group,
            "clip": clip,
            "rows": rows,
            "dtype": str(dtype).removeprefix("torch."),
        },
    }


def measure_feedback(
    dim: int,
    group_size: int | None = None,
    format: Format = SGLANG,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 4 << 20,
) -> dict[str, float]:
    """The rows and bytes that error feedback encodes per second, next to nearest codes without a
    clip and a copy in the same run. Rows, bytes and figures are as in `measure`."""
    group = group_size or dim
    buffers = _allocate(rows, dim, group, format, dtype)
    exact, packed, count = buffers.exact, buffers.packed, buffers.rows
    stored = packed.codes, packed.metadata, buffers.refused
    factor = torch.eye(dim, device="cuda")[None] + torch.rand(1, dim, dim, device="cuda").triu(1)
    nearest = compiled("quantize", Variant(dim, group, dtype, format), exact.device)
    variant = Variant(dim, group, dtype, format, feedback=True)
    kernel = compiled("quantize_with_feedback", variant, exact.device)
    *to, refused = stored
    seconds = _seconds(lambda: kernel(exact, count, factor, *stored))
    of_nearest = _seconds(lambda: nearest(exact, count, None, None, None, *to, None, refused))
    return {
        "feedback_rows_per_second": count / seconds,
        "feedback_bytes_per_second": buffers.bytes / seconds,
        "nearest_bytes_per_second": buffers.bytes / of_nearest,
        "feedback_copy_bytes_per_second": buffers.copy_rate(),
    }


@dataclass(frozen=True)
class _Buffers:
    """Memory of the GPU for one head's rows `[1, N, D]`."""

    exact: torch.Tensor
    restored: torch.Tensor
    packed: Packed
    refused: torch.Tensor

    @property
    def rows(self) -> int:
        return self.exact.shape[1]

    @property
    def bytes(self) -> int:
        """The bytes that a kernel reads and writes."""
        tensors = self.exact, self.packed.codes, self.packed.metadata
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def copy_rate(self) -> float:
        """Bytes that a copy of the rows reads and writes per second."""
        copied = 2 * self.exact.numel() * self.exact.itemsize
        return copied / _seconds(lambda: self.restored.copy_(self.exact))


def _allocate(rows: int, dim: int, group: int, format: Format, dtype: torch.dtype) -> _Buffers:
    """Buffers for `rows` normal rows, or for fewer where 80 % of the free memory cannot hold
    them."""
    free, _ = torch.cuda.mem_get_info()
    # Exact and restored rows; one byte per channel allows for codes and metadata.
    bytes_of_a_row = dim * (2 * dtype.itemsize + 1)
    rows = min(rows, int(free * 0.8) // bytes_of_a_row)
    exact = torch.randn(1, rows, dim, device="cuda", dtype=dtype)
    packed, refused = empty_packed(exact, group, format), unset_flag(exact.device)
    return _Buffers(exact, torch.empty_like(exact), packed, refused)


def _seconds(launch: Callable[[], object]) -> float:
    """Median GPU time of a launch, in seconds."""
    event: Any = torch.cuda.Event
    times: list[float] = []
    for number in range(_REPEATS + _WARM_UP):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        launch()
        end.record()
        end.synchronize()
        if number >= _WARM_UP:
            times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)
