"""Throughput of the CUDA kernels in bytes per second, next to a device copy in the same run."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from rotationzoo.codec.clip import clip_position
from rotationzoo.codec.cuda import Variant, compiled
from rotationzoo.codec.formats import SGLANG, Format
from rotationzoo.codec.int2 import METADATA_TYPES

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
    free, _ = torch.cuda.mem_get_info()
    # Exact and restored rows; one byte per channel allows for codes and metadata.
    bytes_of_a_row = dim * (2 * dtype.itemsize + 1)
    rows = min(rows, int(free * 0.8) // bytes_of_a_row)
    exact = torch.randn(1, rows, dim, device="cuda", dtype=dtype)
    restored = torch.empty_like(exact)
    codes = torch.empty(1, rows, dim // 4, dtype=torch.uint8, device="cuda")
    metadata_type = METADATA_TYPES[format.metadata]
    metadata = torch.empty(1, rows, dim // group, 2, dtype=metadata_type, device="cuda")
    refused = torch.zeros((), dtype=torch.int32, device="cuda")
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

    moved = sum(tensor.numel() * tensor.itemsize for tensor in (exact, codes, metadata))
    launches = {
        "quantize": quantize(False, False),
        "quantize, clip": quantize(True, False),
        "dequantize": dequantize(False),
        "rotate, clip, quantize": quantize(True, True),
        "dequantize, rotate back": dequantize(True),
    }
    copied = 2 * exact.numel() * exact.itemsize
    copy_rate = copied / _seconds(lambda: restored.copy_(exact))
    rates = {name: moved / _seconds(launch) for name, launch in launches.items()}
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
