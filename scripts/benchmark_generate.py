"""Tokens per second of decoding with transformers, by 2-bit and bfloat16 caches, at a long context.

    python scripts/benchmark_generate.py [--context 102400] [--steps 64] [--geometry qwen3-8b]
        [--format sglang] [--output FILE]

The model is transformers' own Qwen3ForCausalLM with random weights in bfloat16 and sdpa. Every
layer of a cache is given random keys and values, as if it had read so many tokens; then the model
decodes greedily. Each step takes the token of the step before. Arms:

* `DecodingGraph`: a `RotatedCache` with steps as a CUDA graph; flushes of the tail are included;
* `RotatedCache, pages`: the same cache, with steps launched by Python;
* `RotatedCache, rows`: the same, with keys and values restored (3 steps);
* `DynamicCache` and `StaticCache`: transformers' own caches in bfloat16, launched by Python.

Peak memory is that of the steps, weights included. Rotations are `hadamard`, because times depend
on shapes alone.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from loading import DEVICE
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config
from transformers import StaticCache as TransformersStaticCache

from rotationzoo import DecodingGraph, RotatedCache
from rotationzoo.calibration.fit import fit
from rotationzoo.model.geometry import Geometry, geometry_of
from rotationzoo.recipe import PRESETS

GEOMETRIES = {
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    },
}  # fmt: skip
WARM_UP = 2  # steps before those that are timed
ROW_STEPS = 3
GIB = 2**30
Record = dict[str, Any]
Step = Callable[[torch.Tensor], torch.Tensor]
"""`(token ids [1, 1]) -> logits [1, vocabulary]`."""


def main() -> int:
    options = parse_arguments()
    model = build_model(GEOMETRIES[options.geometry], options.context + 1024)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    report: Record = {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "geometry": options.geometry,
        "context": options.context,
        "weights_gib": round(weights / GIB, 2),
        "arms": {},
    }
    for measure in (measure_rotated, measure_dynamic, measure_static):
        with torch.no_grad():
            measure(model, options, report["arms"])
        free_memory()
    text = json.dumps(report)
    print(f"\n{report['gpu']}, {options.geometry}, context {options.context:,}\n")
    print(table(report["arms"]))
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return int(any("error" in arm for arm in report["arms"].values()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=102_400, help="tokens before the steps")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-8b")
    parser.add_argument("--format", default="sglang", help="of the 2-bit cache")
    parser.add_argument("--output", type=Path, help="a file for the JSON")
    return parser.parse_args()


def build_model(shape: Record, positions: int) -> PreTrainedModel:
    """A Qwen3 of some shape with random weights in bfloat16."""
    config = Qwen3Config(**shape, max_position_embeddings=positions, tie_word_embeddings=False)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    untyped: Any = model.eval()
    return untyped


def measure_rotated(model: PreTrainedModel, options: argparse.Namespace, arms: Record) -> None:
    """The three ways to decode with a 2-bit cache; one cache serves all."""
    geometry = geometry_of(model)
    rotations = fit(None, PRESETS["hadamard"], geometry)
    # Without a kernel, pages would be read as rows by themselves.
    reading = "pages" if DEVICE == "cuda" else "auto"
    cache = RotatedCache(rotations, model, format=options.format, sink=64, recent=256)
    fill(cache, geometry, options.context)

    def decode_with_graph() -> Record:
        started = synchronized_time()
        with DecodingGraph(model, cache) as step:
            seconds = synchronized_time() - started
            record = measure_steps(step, options.steps, cache.bytes_held)
            captured = step.captures
        return record | {"start_seconds": round(seconds, 2), "graph": captured}

    def decode(count: int) -> Record:
        return measure_steps(launched(model, cache), count, cache.bytes_held)

    attempt(arms, "DecodingGraph", decode_with_graph)
    attempt(arms, f"RotatedCache, {reading}", lambda: decode(options.steps))
    cache.page_reading.wanted = False
    attempt(arms, "RotatedCache, rows", lambda: decode(ROW_STEPS))


def measure_dynamic(model: PreTrainedModel, options: argparse.Namespace, arms: Record) -> None:
    """transformers' usual cache, which copies a layer to append a token."""

    def decode() -> Record:
        cache = DynamicCache(config=model.config)
        return measure_exact(model, cache, options)

    attempt(arms, "DynamicCache, bfloat16", decode)


def measure_static(model: PreTrainedModel, options: argparse.Namespace, arms: Record) -> None:
    """transformers' cache of a fixed size."""

    def decode() -> Record:
        length = options.context + WARM_UP + options.steps
        cache = TransformersStaticCache(config=model.config, max_cache_len=length)
        return measure_exact(model, cache, options)

    attempt(arms, "StaticCache, bfloat16", decode)


def measure_exact(model: PreTrainedModel, cache: Any, options: argparse.Namespace) -> Record:
    fill(cache, geometry_of(model), options.context)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return measure_steps(launched(model, cache), options.steps, held)


def launched(model: PreTrainedModel, cache: Any) -> Step:
    """A step that Python launches, kernel by kernel."""
    untyped: Any = model

    def step(ids: torch.Tensor) -> torch.Tensor:
        output = untyped(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    return step


def fill(cache: Any, geometry: Geometry, tokens: int) -> None:
    """Store random keys and values of so many tokens in every layer."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    for layer in geometry:
        rows = []
        for dim in (layer.key_dim, layer.value_dim):
            shape = 1, layer.kv_heads, tokens, dim
            rows.append(torch.randn(shape, generator=draw, dtype=torch.bfloat16, device=DEVICE))
        cache.update(*rows, layer.index)


def measure_steps(step: Step, count: int, held: int) -> Record:
    """Time steps that follow each other, after a few that are not timed."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    for _ in range(WARM_UP):
        ids = step(ids).argmax(-1, keepdim=True)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = synchronized_time()
    for _ in range(count):
        ids = step(ids).argmax(-1, keepdim=True)
    seconds = (synchronized_time() - started) / count
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {
        "steps": count,
        "step_milliseconds": round(1e3 * seconds, 3),
        "tokens_per_second": round(1 / seconds, 2),
        "cache_gib": round(held / GIB, 3),
        "peak_gib": round(peak / GIB, 3),
    }


def attempt(arms: Record, name: str, measure: Callable[[], Record]) -> None:
    """Add what an arm measured, or its error, so that the others still run."""
    free_memory()
    started = time.monotonic()
    try:
        arms[name] = measure()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        arms[name] = {"error": f"{type(error).__name__}: {lines[0]}"}
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


def synchronized_time() -> float:
    """The time when the GPU has done what it was asked to."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def free_memory() -> None:
    """Give everything back that nobody holds."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
