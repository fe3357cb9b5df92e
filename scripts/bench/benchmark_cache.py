"""What a 2-bit cache takes of a GPU's memory and time, at the geometry of Qwen3-8B: "Speed" and
"Memory" in docs/cache.md.

    python scripts/bench/benchmark_cache.py [--tokens 102400] [--steps 64] [--formats sglang,vllm]
        [--readings pages,rows] [--context 49152] [--limit 3072] [--output FILE]

* First, a context that does not fit in bfloat16 under a `--limit` on torch's memory, which a
  `DynamicCache` fails to read and `RotatedCache` generates from. The prompt is read in chunks.
* Then a table. Every layer of a cache is given random keys and values, as if it had read so many
  tokens, and the model decodes greedily, launched by Python. Arms are transformers' caches in
  bfloat16, and `RotatedCache` in each format, which reads the codes of pages or restores rows (3
  steps). Bytes are those of a cache's tensors, and those that torch's allocator gave out meanwhile.
  A step's memory is what it takes beyond weights and cache; the peak is that of filling and
  decoding, weights included.

Weights are random and the rotations are `hadamard`, because memory and time depend on shapes alone.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import (
    DEVICE,
    attempt,
    describe_error,
    describe_machine,
    free_memory,
    make_parser,
    peak_of,
    require_gpu,
    seconds_of,
    synchronized_time,
)
from random_models import SHAPES, Shape, make_model, random_text
from transformers import DynamicCache, PreTrainedModel, StaticCache

from rotationzoo import RotatedCache
from rotationzoo.artifact.fit import fit
from rotationzoo.model.capture import cache_argument
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import Rotations

LIMITED = Shape(24, 1024, 1024, 8, 8, vocabulary=4096)
"""A small model whose cache is far larger than its weights: 96 KiB a token in bfloat16."""
WARM_UP = 2  # steps before those that are timed
FEW = 3  # steps whose memory is measured, and steps that restore rows
MIB, GIB = 2**20, 2**30
Record = dict[str, Any]


def main() -> int:
    options = parse_arguments()
    require_gpu()
    report: Record = {**describe_machine(), "tokens": options.tokens}
    # The limit comes first, while nothing else has used the GPU's memory.
    report["limited"] = attempt("limited", partial(measure_limited, options))
    free_memory()
    with torch.no_grad():
        report["arms"] = measure_arms(options)
    text = json.dumps(report)
    print(f"\n{report['device']}: {options.tokens:,} tokens\n\n{table(report['arms'])}\n\n{text}")
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return int('"error"' in text)


def parse_arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=102_400, help="before the steps")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--formats", type=names, default=["sglang", "vllm"])
    parser.add_argument("--readings", type=names, default=["pages", "rows"])
    parser.add_argument("--context", type=int, default=49_152, help="tokens of the limited run")
    parser.add_argument("--limit", type=int, default=3072, help="MiB of the limited run")
    parser.add_argument("--output", type=Path, help="a file for the JSON")
    return parser.parse_args()


def fit_hadamard(model: PreTrainedModel) -> Rotations:
    return fit(None, PRESETS["hadamard"], geometry_of(model))


def measure_arms(options: argparse.Namespace) -> Record:
    """Every cache on the large model."""
    model = make_model(replace(SHAPES["8b"], positions=options.tokens + 1024))
    arms: Record = {}
    for name, create, steps in list_caches(model, options):
        arms[name] = attempt(name, lambda c=create, s=steps: measure_cache(model, c(), options, s))
        print(f"{name}: {arms[name]}", flush=True)
    return arms


def list_caches(
    model: PreTrainedModel, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """The name of each arm, what makes its cache, and its timed steps."""
    length = options.tokens + WARM_UP + FEW + options.steps
    yield "DynamicCache", partial(DynamicCache, config=model.config), options.steps
    static = partial(StaticCache, config=model.config, max_cache_len=length)
    yield "StaticCache", static, options.steps
    rotations = fit_hadamard(model)
    for format in options.formats:
        for reading in options.readings:
            settings = {"format": format, "sink": 64, "recent": 256, "reading": reading}
            create = partial(RotatedCache, rotations, model, **settings)
            yield f"{format}, {reading}", create, FEW if reading == "rows" else options.steps


def measure_cache(
    model: PreTrainedModel, cache: Any, options: argparse.Namespace, steps: int
) -> Record:
    """What a cache of so many tokens holds, and what decoding steps take beyond it."""
    fill(model, cache, 1)  # moves the rotations to the GPU
    before = allocated() - bytes_of(cache)
    peak = peak_of(lambda: fill(model, cache, options.tokens - 1))
    report = {
        "tokens": int(cache.get_seq_length()),
        "bytes_held": bytes_of(cache),
        "bytes_allocated": allocated() - before,
    }
    if isinstance(cache, RotatedCache):
        report["bytes_in_bf16"] = cache.bytes_in_bf16
        report["smaller"] = round(cache.bytes_in_bf16 / cache.bytes_held, 3)
    return report | measure_steps(model, cache, steps, peak)


def fill(model: PreTrainedModel, cache: Any, tokens: int) -> None:
    """Store random keys and values of so many tokens in every layer."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    for layer in geometry_of(model):
        rows = []
        for dim in (layer.key_dim, layer.value_dim):
            shape = 1, layer.kv_heads, tokens, dim
            rows.append(torch.randn(shape, generator=draw, dtype=torch.bfloat16, device=DEVICE))
        cache.update(*rows, layer.index)


def bytes_of(cache: Any) -> int:
    """The bytes of a cache's tensors."""
    if isinstance(cache, RotatedCache):
        return cache.bytes_held
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def measure_steps(model: PreTrainedModel, cache: Any, count: int, peak: int) -> Record:
    """The memory of a decoding step, and the time of steps that follow each other; `peak` is the
    most memory before them."""
    given = cache_argument(model, cache)
    ids = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)

    def step() -> None:
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **given)
        ids.copy_(output.logits[:, -1].argmax(-1, keepdim=True))

    beyond = []
    for _ in range(WARM_UP + FEW):  # the first steps also make what libraries keep
        held = allocated()
        most = peak_of(step)
        peak, beyond = max(peak, most), [*beyond, most - held]
    seconds = seconds_of(lambda: [step() for _ in range(count)]) / count
    return {
        "steps": count,
        "step_mib": round(max(beyond[WARM_UP:]) / MIB, 1),
        "step_milliseconds": round(1e3 * seconds, 3),
        "tokens_per_second": round(1 / seconds, 2),
        "peak_gib": round(peak / GIB, 2),
    }


def measure_limited(options: argparse.Namespace) -> Record:
    """`generate` under a limit on memory, from both caches."""
    context, limit = options.context, options.limit * MIB
    torch.cuda.set_per_process_memory_fraction(
        limit / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        model = make_model(replace(LIMITED, positions=context + 64))
        report = {"context": context, "limit_bytes": limit, "weights_bytes": allocated()}
        report["DynamicCache"] = generate(model, DynamicCache(config=model.config), context)
        free_memory()
        rotated = RotatedCache(fit_hadamard(model), model)
        report["RotatedCache"] = generate(model, rotated, context)
        report["bytes_held"], report["bytes_in_bf16"] = rotated.bytes_held, rotated.bytes_in_bf16
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(f"{context:,} tokens under a limit of {options.limit:,} MiB: {report}", flush=True)
    return report


def generate(model: PreTrainedModel, cache: Any, context: int) -> Record:
    """What becomes of 8 tokens after a prompt of random ids that is read in chunks."""
    ids = random_text(LIMITED.vocabulary, 1, context)
    started = synchronized_time()
    report: Record = {"failed": None, "tokens": 0}
    try:
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **cache_argument(model, cache),
            prefill_chunk_size=1024,
            do_sample=False,
            min_new_tokens=8,
            max_new_tokens=8,
        )
        report["tokens"] = text.shape[1] - context
    except torch.OutOfMemoryError as error:
        report["failed"] = describe_error(error)
    seconds = round(synchronized_time() - started, 1)
    return report | {"stored_tokens": int(cache.get_seq_length()), "seconds": seconds}


def allocated() -> int:
    """The bytes that torch's allocator has given out."""
    return torch.cuda.memory_allocated()


def table(arms: Record) -> str:
    """In Markdown."""
    lines = [
        "| cache | GB | allocated | of bfloat16 | step, MiB | step, ms | tokens/s | peak, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        if "error" in arm:
            lines.append(f"| {name} | {arm['error']} | | | | | | |")
            continue
        sizes = f"{arm['bytes_held'] / 1e9:.2f} | {arm['bytes_allocated'] / 1e9:.2f}"
        speed = f"{arm['step_milliseconds']:.1f} | {arm['tokens_per_second']:.1f}"
        smaller = f"1 / {arm.get('smaller', 1):.2f}"
        memory = f"{arm['step_mib']:.0f} | {speed} | {arm['peak_gib']:.1f}"
        lines.append(f"| {name} | {sizes} | {smaller} | {memory} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
