"""What the statistics of a calibration cost: their time over that of the plain forward passes of
the same rows, and how long fitting takes then (docs/results.md, "What a calibration costs").

    python scripts/bench/benchmark_calibrate.py MODEL ... [--published] [--budget] [--data FILE]
        [--tokens 16384] [--length 2048] [--batch 4] [--repeats 3] [--output FILE]

MODEL is a folder, a hub id, `demo`, or one of `8b`, `32b` and `30b-a3b`: Qwen3 of these sizes with
random weights, made on the device (32b takes 66 GB), and random text. All passes run without the
language-model head, in turns, in one process; ratios are medians of those of each turn.
`--published` measures the recipe `oscar-v1`, too, whose key energy takes a second pass, and
`--budget` what each layer loses, which a budget of bits needs. A model that fails stops no other.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import random_models
import torch
from measuring import (
    DEVICE,
    Job,
    attempt,
    describe_machine,
    interleave,
    make_parser,
    peak_of,
    seconds_of,
)
from transformers import PreTrainedModel

from rotationzoo.artifact.fit import fit
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.sensitivity import measure_sensitivities, write_texts
from rotationzoo.linalg.moments import Statistics
from rotationzoo.model import loading
from rotationzoo.model.capture import decoder
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.source import fetch, find
from rotationzoo.progress import silent
from rotationzoo.recipe import Data
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.text.rows import Corpus, read_corpus


def load_chosen(name: str, args: argparse.Namespace) -> tuple[PreTrainedModel, Corpus]:
    """A model on `DEVICE`, of `SHAPES` with random weights and text, or one of a hub id, a folder
    or `demo` in the device's usual type; and the rows of text that the options choose."""
    if name in random_models.SHAPES:
        shape = random_models.SHAPES[name]
        model = random_models.make_model(replace(shape, positions=max(40_960, args.length)))
        size = args.tokens // args.length, args.length
        return model, Corpus([*random_models.random_text(shape.vocabulary, *size)], "random", None)
    source = find(name)
    fetch(source)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model = loading.load(source, loading.load_config(source), DEVICE, dtype)
    data = Data(source=args.data, tokens=args.tokens, length=args.length)
    return model, read_corpus(data, loading.load_tokenizer(source))


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of one model."""
    model, text = load_chosen(name, args)
    print(f"{text.tokens} tokens, {model.dtype}, {model.config._attn_implementation}")
    batches = [ids.to(DEVICE) for ids in text.batches(args.batch)]
    with torch.no_grad():
        geometry = geometry_of(model, batches[0][:1, :32])
    recipe, totals = PRESETS["oscar"], Statistics()

    @torch.no_grad()
    def forward() -> None:
        for ids in batches:
            decoder(model)(input_ids=ids, use_cache=False)

    jobs: dict[str, Job] = {"forward": forward}
    for preset in ("oscar", "oscar-v1") if args.published else ("oscar",):
        jobs[preset] = partial(collect, model, geometry, batches, PRESETS[preset])
    peak = peak_of(lambda: totals.update(jobs["oscar"]()))
    times = interleave(jobs, args.repeats)
    fits = [seconds_of(lambda: fit(totals, recipe, geometry)) for _ in range(3)]
    report = {
        "tokens": text.tokens,
        "weights_bytes": sum(weight.nbytes for weight in model.parameters()),
        "seconds": times,
        "ratios": {job: median_ratio(times, job) for job in jobs},
        "fit_seconds": statistics.median(fits),
        "device_peak_bytes": peak,
    }
    if args.budget:
        texts = write_texts(text.rows, recipe, None)
        given = model, geometry, fit(totals, recipe, geometry), texts, None, silent
        report["sensitivity_seconds"] = seconds_of(lambda: measure_sensitivities(*given))
    return report


def median_ratio(times: dict[str, list[float]], job: str) -> float:
    """How many times as long a job took as the forward passes of the same turn."""
    pairs = zip(times[job], times["forward"], strict=True)
    return statistics.median(seconds / plain for seconds, plain in pairs)


def print_lines(result: dict[str, Any]) -> None:
    for job, seconds in result["seconds"].items():
        median, ratio = statistics.median(seconds), result["ratios"][job]
        speed = f"{result['tokens'] / median:9,.0f} tokens/s"
        print(f"{job:12} {median:7.2f} s  {speed}  {ratio:.3f} x the forward passes")
    print(f"fitting all layers then takes {result['fit_seconds']:.2f} s")
    if "sensitivity_seconds" in result:
        print(f"a budget of bits takes {result['sensitivity_seconds']:.0f} s more")
    peak, weights = result["device_peak_bytes"] / 1e9, result["weights_bytes"] / 1e9
    print(f"peak {peak:.1f} GB on the device, {weights:.1f} GB of them weights", flush=True)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--published", action="store_true", help="oscar-v1, too")
    parser.add_argument("--budget", action="store_true", help="time what a budget of bits needs")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    results, machine = [], describe_machine()
    print(", ".join(map(str, machine.values())))
    for name in args.models:
        print(f"\n{name}", flush=True)
        results.append({"model": name, **attempt(name, partial(measure, name, args))})
        if "error" not in results[-1]:
            print_lines(results[-1])
        if args.output:
            args.output.write_text(json.dumps({**machine, "results": results}, indent=2) + "\n")
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
