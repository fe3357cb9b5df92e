"""How fast the kernels move bytes, beside a device copy in the same run."""

import statistics
from collections.abc import Callable

import torch

from rotationzoo.codec.cuda import compiled
from rotationzoo.codec.int2 import SGLANG, Format, clip_position

_REPEATS = 20


def measure(
    dim: int,
    group_size: int | None = None,
    clip: float = 0.96,
    format: Format = SGLANG,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 4 << 20,
) -> dict[str, object]:
    """Bytes read and written per second by a copy, and by each kernel on `rows` rows, as the
    medians of repeated launches.

    A kernel's bytes are the rows, the packed codes and the metadata; a rotation's reads of its
    matrix are not counted.
    """
    group = group_size or dim
    free, _ = torch.cuda.mem_get_info()
    rows = min(rows, int(free * 0.8) // (dim * (2 * dtype.itemsize + 1)))
    x = torch.randn(1, rows, dim, device="cuda", dtype=dtype)
    y = torch.empty_like(x)
    codes = torch.empty(1, rows, dim // 4, dtype=torch.uint8, device="cuda")
    metadata = torch.empty(1, rows, dim // group, 2, dtype=format.metadata, device="cuda")
    refused = torch.zeros((), dtype=torch.int32, device="cuda")
    rotation = torch.linalg.qr(torch.randn(1, dim, dim))[0].cuda().contiguous()
    channels = group if format.clip_scope == "group" else dim
    rank, weight = (
        t.cuda() for t in clip_position(torch.tensor([clip]), channels, format.interpolated)
    )
    rank = rank.int()

    def quantize(clips: bool, rotates: bool) -> Callable[[], None]:
        kernel = compiled("quantize", dim, group, dtype, format, clips, rotates, x.device)
        return lambda: kernel(x, rows, rotation, rank, weight, codes, metadata, None, refused)

    def dequantize(rotates: bool) -> Callable[[], None]:
        kernel = compiled("dequantize", dim, group, dtype, format, False, rotates, x.device)
        return lambda: kernel(codes, metadata, rows, rotation, y)

    stored = sum(t.numel() * t.itemsize for t in (x, codes, metadata))
    jobs = {
        "quantize": quantize(False, False),
        "quantize, clip": quantize(True, False),
        "dequantize": dequantize(False),
        "rotate, clip, quantize": quantize(True, True),
        "dequantize, rotate back": dequantize(True),
    }
    copy = 2 * x.numel() * x.itemsize / _seconds(lambda: y.copy_(x))
    rates = {name: stored / _seconds(job) for name, job in jobs.items()}
    return {
        "quantize_bytes_per_second": rates["quantize, clip"],
        "dequantize_bytes_per_second": rates["dequantize"],
        "copy_bytes_per_second": copy,
        "throughput": rates,
        "measured": {
            "head_dim": dim, "group_size": group, "clip": clip, "rows": rows, "dtype": str(dtype).removeprefix("torch.")
        },
    }  # fmt: skip


def _seconds(job: Callable[[], object]) -> float:
    times = []
    for number in range(_REPEATS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        job()
        end.record()
        end.synchronize()
        if number >= 3:  # the first pay for compiling and allocating
            times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)
