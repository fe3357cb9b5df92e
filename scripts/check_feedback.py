"""Validate the CUDA kernel of error feedback on every format, type, head dimension and group size,
and measure its speed.

    python scripts/check_feedback.py [--dims 64,128] [--rows 32768] [--jobs 8] [--speed-only]

Needs an NVIDIA GPU and the packages of `rotationzoo[cuda]`. Hostile rows are compared with the
definition on the CPU, and `--rows` random rows with the definition on the GPU. Ends with rows per
second, beside the most that the GPU's float32 units could do.
"""

import argparse
import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from rotationzoo.checks.comparison import KernelComparison, draw_rows, rows_of_each_type
from rotationzoo.codec import cuda_encoder, feedback, int2, throughput
from rotationzoo.linalg.error_feedback import factorize

DIMS = (16, 64, 80, 96, 112, 128, 192, 256, 512)
GROUPS = (4, 20, 32, 64, 128)
SMALL = {4: (16, 64), 20: (80,)}  # groups that split blocks of 16 channels, and where to try them
MEASURED = [
    (64, 64, torch.bfloat16), (128, 128, torch.bfloat16), (128, 32, torch.bfloat16),
    (128, 128, torch.float32), (256, 256, torch.bfloat16),
]  # fmt: skip


def shapes(dims: list[int]) -> Iterator[tuple[int, int]]:
    """Head dimensions and group sizes; the slowest to compile first."""
    for dim in sorted(dims, reverse=True):
        yield dim, dim
        for group in GROUPS:
            if dim % group == 0 and group != dim and dim in SMALL.get(group, dims):
                yield dim, group


def metrics(dim: int) -> torch.Tensor:
    """Metrics `[5, D, D]`: eigenvalues that fall like 1 / n, four directions alone, none, all
    channels alike, and channels of very different weight."""
    generator = torch.Generator().manual_seed(dim)
    normal = torch.randn(3 * dim, dim, generator=generator).double()
    basis = torch.linalg.qr(normal[:dim]).Q
    falling = basis @ torch.diag(1 / torch.arange(1, dim + 1)).double() @ basis.mT
    weighted = normal * torch.randn(dim, generator=generator).double().mul(2).exp()
    ones = torch.ones(dim, dim).double()
    return torch.stack(
        [falling, normal[:4].mT @ normal[:4], 0 * ones, 1e20 * ones, weighted.mT @ weighted]
    )


def hostile_rows(dim: int) -> torch.Tensor:
    """Rows `[5, N, D]`, float32: heavy tails, ties, magnitudes of all exponents, subnormal numbers,
    and a small range on a large offset."""
    generator = torch.Generator().manual_seed(dim)
    shape = 5, 16, dim
    normal = torch.randn(shape, generator=generator)
    ties = torch.randint(-6, 7, shape, generator=generator) / 2
    exponents = torch.randint(-120, 60, shape, generator=generator).float()
    subnormal = torch.randint(-50, 51, shape, generator=generator) * 2.0**-149
    heavy = draw_rows(None, 5, 16, dim, seed=dim)
    return torch.cat([heavy, ties, normal * exponents.exp2(), subnormal, 300 + normal], dim=1)


def check(dim: int, group: int, count: int) -> tuple[str, int]:
    """Validate one shape. Returns it and how many elements were compared. Raises `RotationZooError`
    where any differs."""
    torch.set_num_threads(2)  # others work beside this process
    comparison = KernelComparison(group, on_gpu=True)
    factor = factorize(metrics(dim))
    bulk = draw_rows(None, 5, -(-count // 5), dim, seed=1)
    for format_name, format in int2.FORMATS.items():
        for rows in rows_of_each_type(hostile_rows(dim)):
            comparison.name = f"D {dim}, group {group}, {format_name}, {rows.dtype}"
            expected = feedback.quantize(rows, factor, group, format)
            packed = cuda_encoder.quantize_with_feedback(rows.cuda(), factor, group, format)
            comparison.check_stored(packed, expected, format)
            many, on_gpu = bulk.to(rows.dtype).cuda(), factor.cuda()
            if rows.dtype == torch.float32:  # whether the definition computes the same on this GPU
                again = feedback.quantize(rows.cuda(), on_gpu, group, format)
                comparison.check_stored(packed, again, format)
            expected = feedback.quantize(many, on_gpu, group, format)
            packed = cuda_encoder.quantize_with_feedback(many, on_gpu, group, format)
            comparison.check_stored(packed, expected, format)
    return f"D {dim:3d}, group {group:3d}", comparison.elements


def peak_rows(dim: int) -> float:
    """Rows per second if every float32 unit did one of the D (D - 1) / 2 products or differences of
    each of the four ranges in every cycle, and nothing else."""
    from cuda.core import Device

    gpu = Device(torch.cuda.current_device())
    units = gpu.properties.multiprocessor_count * (64 if gpu.arch == "80" else 128)
    cycles = 1000 * gpu.properties.clock_rate  # which is in kHz
    return units * cycles / (len(feedback.RANGES) * dim * (dim - 1))


def measure(dim: int, group: int, dtype: torch.dtype) -> None:
    shape = f"D {dim}, group {group}, {str(dtype).removeprefix('torch.')}"
    for rows in (1024, 32768, 4 << 20):
        speed = throughput.measure_feedback(dim, group, int2.SGLANG, dtype, rows)
        rate, copy = speed["feedback_rows_per_second"], speed["feedback_copy_bytes_per_second"]
        moved, nearest = speed["feedback_bytes_per_second"], speed["nearest_bytes_per_second"]
        print(
            f"{shape}, {rows:,} rows: {rate / 1e6:.1f} M rows/s, {rows / rate * 1e6:.0f} us, "
            f"{rate / peak_rows(dim):.2f} of the float32 units; {moved / 1e9:.0f} GB/s "
            f"(nearest codes {nearest / 1e9:.0f}, copy {copy / 1e9:.0f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", default=",".join(map(str, DIMS)))
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--jobs", type=int, default=4, help="processes, most of them compiling")
    parser.add_argument("--speed-only", action="store_true")
    args = parser.parse_args()
    if not args.speed_only:
        every = list(shapes([int(dim) for dim in args.dims.split(",")]))
        total, spawn = 0, multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.jobs, mp_context=spawn) as processes:
            dims, groups = zip(*every, strict=True)
            for name, elements in processes.map(check, dims, groups, itertools.repeat(args.rows)):
                print(f"{name}: {elements:,} elements equal", flush=True)
                total += elements
        print(f"{total:,} elements: codes, scales, offsets and dequantized values equal bit by bit")
    for shape in MEASURED:
        measure(*shape)


if __name__ == "__main__":
    main()
