"""Tokens per second of decoding with transformers, by 2-bit and bfloat16 caches, at a long context.

    python scripts/bench/benchmark_generate.py [--context 102400] [--steps 64] [--format sglang]
        [--output FILE]

The model is transformers' own Qwen3ForCausalLM with random weights in bfloat16, of the geometry of
Qwen3-8B, with sdpa. Every layer of a cache is given random keys and values, as if it had read so
many tokens. Then the model decodes greedily: each step takes the token of the one before. Arms:

* `RotatedCache, pages`: steps that read the codes, launched by Python;
* `RotatedCache, rows`: the same, with keys and values restored (3 steps);
* `DynamicCache` and `StaticCache`: transformers' own caches in bfloat16, launched by Python.

Peak memory is that of an arm with its filling, weights included. Rotations are
`hadamard`, because times depend on shapes alone.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmark_memory import QWEN3_8B, Record, attempt, build_model, fill
from measuring import DEVICE, free_memory, make_parser, require_gpu, synchronized_time
from transformers import DynamicCache, PreTrainedModel, StaticCache

from rotationzoo import RotatedCache
from rotationzoo.artifact.fit import fit
from rotationzoo.model.cache_names import cache_argument
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe.loading import PRESETS

WARM_UP = 2  # steps before those that are timed
ROW_STEPS = 3
GIB = 2**30


def main() -> int:
    options = parse_arguments()
    require_gpu()
    model = build_model(QWEN3_8B, options.context + 1024)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    report: Record = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "context": options.context,
        "weights_gib": round(weights / GIB, 2),
        "arms": {},
    }
    with torch.no_grad():
        measure_rotated(model, options, report["arms"])
        measure_exact(model, options, report["arms"])
    text = json.dumps(report)
    print(f"\n{report['gpu']}: context {options.context:,}\n")
    print(table(report["arms"]))
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return int(any("error" in arm for arm in report["arms"].values()))


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--context", type=int, default=102_400, help="tokens before the steps")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--format", default="sglang", help="of the 2-bit cache")
    parser.add_argument("--output", type=Path, help="a file for the JSON")
    return parser.parse_args()


def measure_rotated(model: PreTrainedModel, options: argparse.Namespace, arms: Record) -> None:
    """The two ways to decode with a 2-bit cache; one cache serves both."""
    geometry = geometry_of(model)
    rotations = fit(None, PRESETS["hadamard"], geometry)
    cache = RotatedCache(rotations, model, format=options.format, sink=64, recent=256)
    fill(cache, geometry, options.context)

    def decode(count: int) -> Record:
        return measure_steps(model, cache, count, cache.bytes_held)

    measure_arm(arms, "RotatedCache, pages", lambda: decode(options.steps))
    cache.page_reading.wanted = False
    measure_arm(arms, "RotatedCache, rows", lambda: decode(ROW_STEPS))


def measure_exact(model: PreTrainedModel, options: argparse.Namespace, arms: Record) -> None:
    """transformers' usual cache, which copies a layer to append a token, and its one of a fixed
    size."""
    length = options.context + WARM_UP + options.steps
    caches = {
        "DynamicCache": lambda: DynamicCache(config=model.config),
        "StaticCache": lambda: StaticCache(config=model.config, max_cache_len=length),
    }

    def decode(cache: Any) -> Record:
        fill(cache, geometry_of(model), options.context)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return measure_steps(model, cache, options.steps, held)

    for name, create in caches.items():
        measure_arm(arms, f"{name}, bfloat16", lambda create=create: decode(create()))


def measure_steps(model: PreTrainedModel, cache: Any, count: int, held: int) -> Record:
    """Time steps that Python launches, one after another, after a few that are not timed."""
    untyped: Any = model
    given = cache_argument(model, cache)
    ids = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    started = 0.0
    for step in range(WARM_UP + count):
        if step == WARM_UP:
            started = synchronized_time()
        output = untyped(input_ids=ids, use_cache=True, logits_to_keep=1, **given)
        ids = output.logits[:, -1].argmax(-1, keepdim=True)
    seconds = (synchronized_time() - started) / count
    return {
        "steps": count,
        "step_milliseconds": round(1e3 * seconds, 3),
        "tokens_per_second": round(1 / seconds, 2),
        "cache_gib": round(held / GIB, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
    }


def measure_arm(arms: Record, name: str, measure: Callable[[], Record]) -> None:
    """Add what an arm measured, or its error, so that the others still run."""
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    arms[name] = attempt(name, measure)
    print(f"{name}: {arms[name]}, after {time.monotonic() - started:.1f} s", flush=True)


def table(arms: Record) -> str:
    """In Markdown, with speeds beside the fastest arm in bfloat16."""
    speeds = [arm.get("tokens_per_second", 0) for name, arm in arms.items() if "bfloat" in name]
    fastest = max(speeds, default=0)
    lines = [
        "| decoding with | tokens/s | step, ms | x fastest bf16 | cache, GiB | peak, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        if "error" in arm:
            lines.append(f"| {name} | {arm['error']} | | | | |")
            continue
        speed = arm["tokens_per_second"]
        ratio = f"{speed / fastest:.2f}" if fastest else ""
        lines.append(
            f"| {name} | {speed:.1f} | {arm['step_milliseconds']:.1f} | {ratio} "
            f"| {arm['cache_gib']:.2f} | {arm['peak_gib']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
