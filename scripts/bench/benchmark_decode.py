"""Decode attention of one layer, over 2-bit codes and in bfloat16, side by side on one GPU.

    python scripts/bench/benchmark_decode.py [--shapes 1x16384,1x102400,8x102400,32x16384,64x32768]
        [--formats sglang,vllm,fine] [--sglang FILE] [--splits 8,16,32,64,128] [--output FILE]

One new token for each request, bfloat16 queries, all requests equally long. Every kernel gets the
median of many replays of a CUDA graph, so that what the CPU does for a launch does not count. The
launches of a graph read as many different caches in turn as fill the L2 cache 32 times: caches
are cold. The kernels:

* torch's `scaled_dot_product_attention` on flash attention and on cuDNN, each in the fastest of
  two orders of the cache in memory, with the query heads of a group as queries or `enable_gqa`;
* SGLang's Triton kernel, with the fastest number of splits, where `--sglang` names its
  `decode_attention.py`; FlashAttention-3 where it is installed;
* ours: `rotationzoo.codec.cuda_attention.attend`, over packed codes and exact windows of 64 and
  256 tokens, with its own number of splits, and with the fastest of others. All that it launches
  counts, rotations of queries and outputs included.

Bytes are the cache's: what any kernel must read of it. The bandwidths they are divided by are
measured in the same run: a copy (bytes read and written) and the fastest of torch's reductions.
`error` is relative to the norm of the first request's output in float32, which guards against
timing a kernel that computes something else.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from decode_arms import SPLITS, exact_arms, exact_error, first_request, packed_variants
from decode_caches import LAYOUTS, Shape, Storage, exact_caches, packed_caches
from decode_timing import Launch, Timing, bandwidths, copies_of, measure
from measuring import describe_error, make_parser, require_gpu
from sglang_kernel import load_sglang

from rotationzoo.codec import attention
from rotationzoo.codec.attention import Scores
from rotationzoo.errors import RotationZooError

SHAPES = "1x16384,1x102400,8x102400,32x16384,64x32768"


@dataclass(frozen=True)
class Row:
    """One kernel at one shape."""

    shape: str
    kernel: str
    bits: int
    variant: str
    bytes: int
    error: float
    timing: Timing

    @property
    def rate(self) -> float:
        return self.bytes / self.timing.median


def exact_rows(shape: Shape, sglang: ModuleType | None, splits: Sequence[int]) -> Iterator[Row]:
    """Every variant of every bfloat16 kernel. A kernel that does not run is reported."""
    caches = exact_caches(shape, copies_of(shape.bytes), "cuda")
    query = new_query(shape)
    for arm in exact_arms(shape, sglang, splits):
        sides = [[arm.view(side, shape) for side in cache] for cache in caches]
        try:
            output = arm.read(query, *sides[0])
            error = exact_error(output, query, *sides[0])
            launches: list[Launch] = [
                lambda read=arm.read, sides=both: read(query, *sides)  # type: ignore[misc]
                for both in sides
            ]
            timing = measure(launches)
        except Exception as problem:  # of libraries that have their own
            report(f"{shape}: {arm.name}, {arm.variant}", problem)
            continue
        yield Row(str(shape), arm.name, 16, arm.variant, shape.bytes, error, timing)


def packed_rows(shape: Shape, format: str) -> Iterator[Row]:
    """Our kernel in every variant."""
    try:
        attend = import_module("rotationzoo.codec.cuda_attention").attend
    except ImportError as problem:
        report(f"ours, {format}", problem)
        return
    storage = Storage(format)
    size = storage.bytes(shape)
    caches, query = packed_caches(shape, storage, copies_of(size), "cuda"), new_query(shape)
    first, scores = first_request(caches[0]), Scores(shape.dim**-0.5)
    expected = attention.attend(query[:1].float(), first.packed, first.head, first.tail, scores)
    for variant, read in packed_variants(attend, shape):
        launches: list[Launch] = [
            lambda read=read, cache=cache: read(query, cache)  # type: ignore[misc]
            for cache in caches
        ]
        try:
            difference = read(query, caches[0])[:1].float() - expected
            error = (difference.norm() / expected.norm()).item()
            timing = measure(launches)
        except (RuntimeError, RotationZooError) as problem:
            report(f"{shape}: ours, {format}, {variant}", problem)
            continue
        kernel = f"ours, {format}" + (", other splits" if "its own" not in variant else "")
        yield Row(str(shape), kernel, 2, variant, size, error, timing)


def new_query(shape: Shape) -> torch.Tensor:
    size = shape.batch, shape.heads, 1, shape.dim
    return torch.randn(size, dtype=torch.bfloat16, device="cuda")


def report(what: str, problem: Exception) -> None:
    """Print why a kernel is left out."""
    print(f"{what}: {describe_error(problem)}", flush=True)


def fastest(rows: Sequence[Row]) -> list[Row]:
    """The fastest variant of each kernel."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        place = row.shape, row.kernel
        if place not in best or row.timing.median < best[place].timing.median:
            best[place] = row
    return list(best.values())


def table(rows: Sequence[Row], rates: dict[str, float]) -> str:
    """All shapes and kernels in Markdown, with speeds beside the fastest in bfloat16."""
    lines = [
        "| batch x context | kernel | MB | µs | of copy | of read | x bf16 | error | variant |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peers = [r.timing.median for r in rows if r.shape == row.shape and r.bits == 16]
        ahead = f"{min(peers) / row.timing.median:.2f}" if peers else ""
        shares = " | ".join(f"{row.rate / rates[name]:.2f}" for name in ("copy", "read"))
        lines.append(
            f"| {row.shape} | {row.kernel} | {row.bytes / 1e6:,.1f} "
            f"| {row.timing.microseconds:.1f} | {shares} | {ahead} | {row.error:.0e} "
            f"| {row.variant} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", default=SHAPES, help="batch x context, with commas between")
    parser.add_argument("--formats", default="sglang,vllm,fine", help=", ".join(LAYOUTS))
    parser.add_argument("--sglang", type=Path, help="decode_attention.py of SGLang")
    parser.add_argument("--splits", default=",".join(map(str, SPLITS)), help="of SGLang's kernel")
    parser.add_argument("--output", type=Path, help="JSON, written after every shape")
    args = parser.parse_args()
    start = time.monotonic()
    shapes = [Shape(*map(int, name.split("x"))) for name in args.shapes.split(",")]
    formats, splits = args.formats.split(","), [int(count) for count in args.splits.split(",")]
    require_gpu()
    sglang = load_sglang(args.sglang) if args.sglang else None
    rates, rows = bandwidths(), list[Row]()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    with torch.inference_mode():
        for shape in shapes:
            for format in formats:
                rows += packed_rows(shape, format)
                torch.cuda.empty_cache()
            rows += exact_rows(shape, sglang, splits)
            torch.cuda.empty_cache()
            print(table(fastest([row for row in rows if row.shape == str(shape)]), rates))
            print(f"after {time.monotonic() - start:.0f} s", flush=True)
            if args.output:
                save(args.output, rows, rates)
    rates_line = ", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in rates.items())
    print(f"\n{torch.cuda.get_device_name()}: {rates_line}\n")
    print(table(fastest(rows), rates))
    return int(not any(row.bits == 2 for row in rows))


def save(path: Path, rows: Sequence[Row], rates: dict[str, float]) -> None:
    content = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bytes_per_second": rates,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    sys.exit(main())
