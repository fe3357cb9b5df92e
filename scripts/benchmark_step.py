"""A whole decoding step of a model with random weights over a long context: its cache in 2 bits
beside bfloat16.

    python scripts/benchmark_step.py [--context 102400] [--batches 1] [--format sglang]
        [--sglang FILE] [--layers 36] [--plain] [--output FILE]

The model has the geometry of Qwen3-8B and is written in plain torch, with its elementwise parts
compiled (not with `--plain`), and for one request with kernels of its own (`step_products`); the
step is replayed as a CUDA graph, from token ids to token ids.
Batches are those given and the largest that fits each cache on this GPU.

* bfloat16: a cache of a fixed size that already holds the context. The step writes the new token
  and reads the cache with the kernel that is fastest on it, of all in `benchmark_decode`.
* 2 bits: the new token goes into an exact tail of a fixed size, at a place read on the device, and
  `rotationzoo.codec.cuda_attention.attend` reads codes and windows (64 first, 256 recent tokens;
  the tail holds 32 more, as many as wait on average). Tokens that leave the window are quantized
  outside the graph, 64 at a time in all layers at once. That takes its time from the clock, CPU
  included, and a 64th of it is added to every step: the column `flush`.

Contents are random, which changes no time. Bytes are the weights without the embedding, and the
cache; the bound is these bytes at the rate at which a reduction reads in the same run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from decode_caches import Shape, Storage
from decode_timing import bandwidths, measure
from sglang_kernel import load_sglang
from step_caches import FLUSHED, PackedLayers, exact_layers, free, request_bytes
from step_model import Geometry, Model
from step_products import OneRequest, Placed

from rotationzoo.codec.formats import FORMATS

_RESERVE = 3 << 30  # bytes left for logits, graphs and the libraries' work space
_FLUSHES = 7
_CHECKED_LAYERS, _ROUNDING = 2, 0.03
"""How far apart logits may be after so many layers of random weights, relative to their norm: with
attention, 0.014 was measured; without, plain torch is off by 0.007 from float32, and these kernels
by 0.005."""


@dataclass(frozen=True)
class Row:
    """One cache at one batch size."""

    cache: str
    batch: int
    step: float
    """Seconds of a step, without the share of a flush."""
    flush: float
    """Seconds of a flush, over the steps between two."""
    bytes: int
    kernel: str

    @property
    def seconds(self) -> float:
        return self.step + self.flush

    @property
    def tokens(self) -> float:
        """Tokens per second."""
        return self.batch / self.seconds


def time_step(model: Model, shape: Shape, caches: Sequence[Placed]) -> float:
    """Seconds of a step."""
    tokens = torch.randint(model.geometry.vocabulary, (shape.batch,), device="cuda")
    position = torch.tensor([shape.context - 1], device="cuda")
    compute = model.logits
    if shape.batch == 1:
        compute = OneRequest(model).logits
        check_products(model, tokens, position, caches)
    timing = measure([lambda: compute(tokens, position, caches).argmax(-1)], seconds=1.0)
    if not timing.graph:
        print("the step was not captured: CPU time counts")
    return timing.median


def check_products(
    model: Model, tokens: torch.Tensor, position: torch.Tensor, caches: Sequence[Placed]
) -> None:
    """End the run unless the kernels for one request compute what plain torch does, up to rounding,
    which adds up from layer to layer."""
    few = copy(model)
    few.layers, few_caches = model.layers[:_CHECKED_LAYERS], caches[:_CHECKED_LAYERS]
    expected = few.logits(tokens, position, few_caches).float()
    logits = OneRequest(few).logits(tokens, position, few_caches).float()
    error = ((logits - expected).norm() / expected.norm()).item()
    print(f"kernels for one request: logits differ by {error:.1e} after {_CHECKED_LAYERS} layers")
    if not error < _ROUNDING:
        sys.exit("the kernels for one request are wrong")


def exact_row(model: Model, shape: Shape, sglang: ModuleType | None) -> Row:
    caches, kernel = exact_layers(shape, model.geometry.layers, sglang)
    size = model.bytes + model.geometry.layers * shape.bytes
    return Row("bfloat16", shape.batch, time_step(model, shape, caches), 0.0, size, kernel)


def packed_row(model: Model, shape: Shape, storage: Storage) -> Row:
    kernel = import_module("rotationzoo.codec.cuda_attention").attend
    caches = PackedLayers(shape, model.geometry.layers, kernel, storage)
    seconds = time_step(model, shape, caches.layers)
    times = []
    for _ in range(_FLUSHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        caches.flush()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        caches.undo()
    flush = statistics.median(times) / FLUSHED
    size = model.bytes + model.geometry.layers * storage.bytes(shape)
    return Row(f"2 bits, {storage.format}", shape.batch, seconds, flush, size, "ours")


def table(rows: Sequence[Row], rate: float) -> str:
    """In Markdown."""
    lines = [
        "| cache | batch | step, ms | of it flush | tokens/s | GB read | bound, ms | of bound "
        "| x bf16, same batch | attention |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    exact = {row.batch: row.seconds for row in rows if row.cache == "bfloat16"}
    for row in rows:
        bound = row.bytes / rate
        ahead = f"{exact[row.batch] / row.seconds:.2f}" if row.batch in exact else ""
        lines.append(
            f"| {row.cache} | {row.batch} | {1e3 * row.seconds:.2f} | {1e3 * row.flush:.2f} "
            f"| {row.tokens:.1f} | {row.bytes / 1e9:.1f} | {1e3 * bound:.2f} "
            f"| {bound / row.seconds:.2f} | {ahead} | {row.kernel} |"
        )
    return "\n".join(lines)


def most(bytes_of_a_request: int) -> int:
    """The largest batch that fits into free memory."""
    free()
    available, _ = torch.cuda.mem_get_info()
    return max(0, (available - _RESERVE) // bytes_of_a_request)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=102_400, help="tokens, the new one included")
    parser.add_argument("--batches", default="1", help="requests, with commas between")
    parser.add_argument("--format", default="sglang", choices=FORMATS)
    parser.add_argument("--sglang", type=Path, help="decode_attention.py of SGLang")
    parser.add_argument("--layers", type=int, default=Geometry.layers)
    parser.add_argument("--plain", action="store_true", help="compile nothing")
    parser.add_argument("--output", type=Path, help="JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU")
    start = time.monotonic()
    sglang = load_sglang(args.sglang) if args.sglang else None
    rates = bandwidths()
    free()
    storage, rows = Storage(args.format), list[Row]()
    with torch.inference_mode():
        model = Model(Geometry(layers=args.layers), "cuda", fuse=not args.plain)
        one = Shape(1, args.context)
        batches = [int(batch) for batch in args.batches.split(",")]
        most_exact = most(args.layers * one.bytes)
        most_packed = most(args.layers * request_bytes(one, storage))
        print(f"largest batch: {most_exact} in bfloat16, {most_packed} in 2 bits", flush=True)
        jobs = [(batch, exact) for batch in batches for exact in (True, False)]
        jobs += [(most_packed, False), (most_exact, True), (most_exact, False)]
        for batch, exact in dict.fromkeys(jobs):
            if not 0 < batch <= (most_exact if exact else most_packed):
                print(f"a batch of {batch} does not fit")
                continue
            shape = Shape(batch, args.context)
            if exact:
                rows.append(exact_row(model, shape, sglang))
            else:
                rows.append(packed_row(model, shape, storage))
            free()
            print(table(rows[-1:], rates["read"]).splitlines()[-1], flush=True)
            print(f"after {time.monotonic() - start:.0f} s", flush=True)
    rates_line = ", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in rates.items())
    print(f"\n{torch.cuda.get_device_name()}: {rates_line}; context {args.context:,}\n")
    print(table(rows, rates["read"]))
    print(summary(rows))
    if args.output:
        content = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "context": args.context,
            "bytes_per_second": rates,
            "rows": [asdict(row) for row in rows],
        }
        args.output.write_text(json.dumps(content, indent=2))
    return 0


def summary(rows: Sequence[Row]) -> str:
    """Tokens per second of the best batch of each cache, beside each other."""
    best = {
        exact: max(row.tokens for row in rows if (row.cache == "bfloat16") == exact)
        for exact in {row.cache == "bfloat16" for row in rows}
    }
    if len(best) < 2:
        return ""
    return (
        f"\nMost tokens per second: {best[False]:.1f} in 2 bits, {best[True]:.1f} in bfloat16: "
        f"{best[False] / best[True]:.2f} times"
    )


if __name__ == "__main__":
    sys.exit(main())
