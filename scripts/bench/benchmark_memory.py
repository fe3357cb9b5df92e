"""What a 2-bit cache takes of a GPU's memory, at the geometry of Qwen3-8B with random weights.

    python scripts/bench/benchmark_memory.py [--tokens 131072] [--formats sglang,vllm]
        [--readings rows,pages] [--output FILE]

Three parts, each with lines of text and an entry of the JSON that comes last:

* `limited`: a context that does not fit in bfloat16 under a limit on torch's memory, which a
  `DynamicCache` fails to read and `RotatedCache` generates from. The prompt is read in chunks;
* `encoders`: how fast tokens are quantized, by the CUDA kernels and by their definitions in torch;
* `held`: what the cache holds of a context in which every layer stored random keys and values, by
  its tensors and by what torch's allocator gave out meanwhile, beside a `DynamicCache` of the same
  tokens; and the peak of one decoding step of the real model beyond weights and cache.

Weights, keys and values are random and the rotations are `hadamard`, because memory depends on
shapes alone.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measuring import (
    DEVICE,
    describe_error,
    free_memory,
    make_parser,
    require_gpu,
    seconds_of,
    synchronized_time,
)
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config

from rotationzoo import RotatedCache
from rotationzoo.artifact.fit import fit
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.settings import CacheOptions, CacheSettings
from rotationzoo.geometry import Geometry, Layer
from rotationzoo.linalg.error_feedback import factorize
from rotationzoo.model.cache_names import cache_argument
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import Rotation, Rotations

QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
KEYS = Layer(0, 0, 32, 8, 128, 128)
"""One layer of it."""
LIMITED = {
    "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096,
}  # fmt: skip
"""A small model whose cache is far larger than its weights: 96 KiB a token in bfloat16."""
STEPS = 3  # decoding steps that are timed
MIB = 2**20
Record = dict[str, Any]


def main() -> int:
    options = parse_arguments()
    require_gpu()
    report: Record = {"gpu": torch.cuda.get_device_name(), "tokens": options.tokens}
    # The limit comes first, while nothing else has used the GPU's memory.
    parts: dict[str, Callable[[], Record]] = {
        "limited": lambda: measure_limited(options.context, options.limit * MIB),
        "encoders": measure_encoders,
        "held": lambda: measure_model(options),
    }
    for name, measure in parts.items():
        started = time.perf_counter()
        report[name] = attempt(name, measure)
        report[name]["seconds"] = round(time.perf_counter() - started, 1)
        free_memory()
        if options.output:
            options.output.write_text(json.dumps(report) + "\n", encoding="utf-8")
    text = json.dumps(report)
    print(text)
    return int('"error"' in text)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=["sglang", "vllm"])
    parser.add_argument("--readings", type=lambda text: text.split(","), default=["rows"])
    parser.add_argument("--context", type=int, default=49152, help="tokens of the limited run")
    parser.add_argument("--limit", type=int, default=3072, help="MiB of the limited run")
    parser.add_argument("--output", type=Path, help="a file for the JSON")
    return parser.parse_args()


def attempt(name: str, measure: Callable[[], Record]) -> Record:
    """What a part measured, or its error, so that the other parts still run."""
    try:
        return measure()
    except Exception as error:
        print(f"{name} failed: {describe_error(error)}", file=sys.stderr, flush=True)
        return {"error": describe_error(error)}


def build_model(shape: Record, positions: int) -> PreTrainedModel:
    """A Qwen3 of some shape with random weights in bfloat16."""
    config = Qwen3Config(**shape, max_position_embeddings=positions, tie_word_embeddings=False)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    untyped: Any = model.eval().to(DEVICE)
    return untyped


def measure_model(options: argparse.Namespace) -> Record:
    """Every format and reading, and bfloat16, on the large model."""
    model = build_model(QWEN3_8B, options.tokens + 64)
    geometry = geometry_of(model)
    rotations = fit(None, PRESETS["hadamard"], geometry)
    plain = attempt("bf16", lambda: measure_bf16(model, geometry, options.tokens))
    report: Record = {"bf16": plain}
    for format in options.formats:
        for reading in options.readings:
            name = f"{format}, {reading}"
            free_memory()
            report[name] = attempt(
                name, lambda f=format, r=reading: measure_cache(model, rotations, f, r, options)
            )
    return report


@torch.no_grad()
def measure_cache(
    model: PreTrainedModel,
    rotations: Rotations,
    format: str,
    reading: str,
    options: argparse.Namespace,
) -> Record:
    """What a `RotatedCache` with so many tokens holds, and what a decoding step takes beyond it."""
    settings: CacheOptions = {"format": format, "sink": 64, "recent": 256, "reading": reading}
    cache = RotatedCache(rotations, model, **settings)
    geometry = geometry_of(model)
    fill(cache, geometry, 1)  # moves the rotations to the GPU
    before = allocated() - cache.bytes_held
    seconds = fill(cache, geometry, options.tokens - 1)
    report = {
        "tokens": cache.get_seq_length(),
        "bytes_held": cache.bytes_held,
        "bytes_allocated": allocated() - before,
        "bytes_in_bf16": cache.bytes_in_bf16,
        "fill_seconds": round(seconds, 2),
    }
    report["smaller"] = round(report["bytes_in_bf16"] / report["bytes_held"], 3)
    report |= measure_steps(model, cache)
    print(
        f"{format}, {report['tokens']:,} tokens: {report['bytes_held'] / 1e9:.3f} GB by tensors, "
        f"{report['bytes_allocated'] / 1e9:.3f} GB by the allocator, "
        f"{report['bytes_in_bf16'] / 1e9:.3f} GB in bfloat16: {report['smaller']:.2f} times "
        f"smaller; filled in {seconds:.1f} s; read as {reading}, {describe_step(report)}",
        flush=True,
    )
    return report


@torch.no_grad()
def measure_bf16(model: PreTrainedModel, geometry: Geometry, tokens: int) -> Record:
    """The same of transformers' own cache, which copies a layer to append a token."""
    cache = DynamicCache(config=model.config)
    before = allocated()
    fill(cache, geometry, tokens)
    report = {"bytes_allocated": allocated() - before} | measure_steps(model, cache)
    print(
        f"DynamicCache, {tokens:,} tokens: {report['bytes_allocated'] / 1e9:.3f} GB by the "
        f"allocator; {describe_step(report)}",
        flush=True,
    )
    return report


def describe_step(report: Record) -> str:
    return (
        f"a decoding step takes {report['step_peak_mib']:.0f} MiB beyond weights and cache, and "
        f"{report['step_seconds'] * 1e3:.0f} ms"
    )


@torch.no_grad()
def fill(cache: Any, geometry: Geometry, tokens: int) -> float:
    """Store random keys and values of so many tokens in every layer; returns the seconds."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    started = synchronized_time()
    for layer in geometry:
        rows = []
        for dim in (layer.key_dim, layer.value_dim):
            shape = 1, layer.kv_heads, tokens, dim
            rows.append(torch.randn(shape, generator=draw, dtype=torch.bfloat16, device=DEVICE))
        cache.update(*rows, layer.index)
    return synchronized_time() - started


def measure_steps(model: PreTrainedModel, cache: Any) -> Record:
    """The peak memory of a decoding step beyond what is there before it, and its median time."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    untyped: Any = model
    peaks, seconds = [], []
    # The first step also makes what libraries keep, such as workspaces.
    for _ in range(1 + STEPS):
        started = synchronized_time()
        torch.cuda.reset_peak_memory_stats()
        before = allocated()
        untyped(input_ids=ids, logits_to_keep=1, **cache_argument(model, cache))
        seconds.append(synchronized_time() - started)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return {
        "step_peak_mib": round(max(peaks[1:]) / MIB, 1),
        "first_step_peak_mib": round(peaks[0] / MIB, 1),
        "step_seconds": round(statistics.median(seconds[1:]), 4),
    }


@torch.no_grad()
def measure_encoders() -> Record:
    """Tokens per second that one layer's keys are rotated and quantized with, in pieces, and the
    time of one token, by kernels and by definitions."""
    rotations = fit(None, PRESETS["hadamard"], [KEYS]).replace(with_factor)
    kernels = RotatedCodec.encoder
    report: Record = {}
    for rounding in ("nearest", "feedback"):
        arm = RotatedCodec(rotations, rounding=rounding)
        for encoder, choose in (("kernel", kernels), ("definition", lambda *_: None)):
            with patch.object(RotatedCodec, "encoder", choose):
                speeds = time_encoder(CacheSettings(arm, CacheLayout(SIMULATED["sglang"])))
            report[f"{rounding}, {encoder}"] = speeds
            print(
                f"keys of one layer, {rounding} codes, {encoder}: "
                f"{speeds['tokens_per_second'] / 1e3:,.0f} thousand tokens/s in pieces of 2,048, "
                f"{speeds['token_milliseconds']:.2f} ms for a single one",
                flush=True,
            )
    return report


def with_factor(layer: int, side: str, rotation: Rotation) -> Rotation:
    """A rotation with factors of error feedback, for a metric of falling eigenvalues."""
    dim, heads = rotation.dim, len(rotation.clip)
    basis = torch.linalg.qr(torch.randn(heads, dim, dim, dtype=torch.float64)).Q
    falling = torch.diag(1 / torch.arange(1, dim + 1, dtype=torch.float64))
    return replace(rotation, feedback=factorize(basis @ falling @ basis.mT))


def time_encoder(settings: CacheSettings) -> Record:
    """Tokens a second in pieces of 2,048 tokens, and milliseconds of a single one."""
    rotation, format = settings.codec.rotations[0].key, settings.layout.format
    shape = 1, len(rotation.clip), 2048, rotation.dim
    rows = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    settings = settings.for_layer(0, rows, rows)
    seconds = {}
    for count in (2048, 1):
        encode = partial(settings.codec.pack, rows[:, :, :count], 0, "key", format)
        encode()
        seconds[count] = statistics.mean(seconds_of(encode) for _ in range(4))
    return {
        "tokens_per_second": round(2048 / seconds[2048]),
        "token_milliseconds": round(1e3 * seconds[1], 3),
    }


def measure_limited(context: int, limit: int) -> Record:
    """`generate` under a limit on memory, from both caches."""
    torch.cuda.set_per_process_memory_fraction(
        limit / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        model = build_model(LIMITED, context + 64)
        weights = allocated()
        rotations = fit(None, PRESETS["hadamard"], geometry_of(model))
        plain = generate(model, DynamicCache(config=model.config), context)
        free_memory()
        rotated = RotatedCache(rotations, model)
        report = {
            "context": context,
            "limit_bytes": limit,
            "weights_bytes": weights,
            "DynamicCache": plain,
            "RotatedCache": generate(model, rotated, context),
        }
        report["bytes_held"] = rotated.bytes_held
        report["bytes_in_bf16"] = rotated.bytes_in_bf16
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(
        f"{context:,} tokens under a limit of {limit / MIB:,.0f} MiB (weights "
        f"{weights / MIB:,.0f}; in bfloat16 they take {report['bytes_in_bf16'] / MIB:,.0f}, in 2 "
        f"bits {report['bytes_held'] / MIB:,.0f}): "
        f"DynamicCache {outcome(plain)}; RotatedCache {outcome(report['RotatedCache'])}",
        flush=True,
    )
    return report


def generate(model: PreTrainedModel, cache: Any, context: int) -> Record:
    """What becomes of 8 tokens after a prompt of random ids that is read in chunks."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, context), generator=draw).to(DEVICE)
    started = synchronized_time()
    torch.cuda.reset_peak_memory_stats()
    report: Record = {"failed": None, "tokens": 0}
    untyped: Any = model
    try:
        text = untyped.generate(
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
    return report | {
        "stored_tokens": cache.get_seq_length(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "seconds": round(synchronized_time() - started, 1),
    }


def outcome(report: Record) -> str:
    """One phrase for a run of `generate`."""
    if report["failed"]:
        return f"fails after {report['stored_tokens']:,} tokens ({report['failed'][:90]})"
    return (
        f"generates {report['tokens']} tokens, peak {report['peak_bytes'] / MIB:,.0f} MiB, "
        f"{report['seconds']} s"
    )


def allocated() -> int:
    """The bytes that torch's allocator has given out."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    sys.exit(main())
