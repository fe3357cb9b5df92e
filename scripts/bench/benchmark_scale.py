"""Calibration and evaluation of models of published sizes, in one command on a machine.

    python scripts/bench/benchmark_scale.py [--parts statistics,evaluate]
        [--models 8b,32b,30b-a3b] [--tokens 32768] [--length 4096] [--batch 4] [--repeats 5]
        [--layers N] [--evaluate-length 32768] [--seconds 480] [--output FILE]

Needs an NVIDIA GPU with room for the largest model, which is 66 GB for 32b, and no network: weights
are random and made on the device, in the geometries of `scale_models`, and so is the text.

* `statistics`: for every model, the statistics of the recipe `oscar` beside the plain forward
  passes of the same rows, in turns, and the fit after them.
* `evaluate`: for the first model, a text and the recall prompts of `--evaluate-length` tokens.

Utilization is of the FLOP/s of a bf16 matrix product of 8,192 rows and columns in the same run.
FLOPs are counted from the shapes, attention by the pairs that its causal mask shows, experts by
those that a token passes. No part begins after `--seconds`; parts that did not run are named.
Prints a table; `--output` writes everything as JSON.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import scale_models
import torch
import transformers
from measuring import DEVICE, describe_error, free_memory, make_parser
from scale_evaluate import evaluate_lines, measure_evaluate
from scale_statistics import Bench, Text, measure_statistics, statistics_lines

LINES = {"statistics": statistics_lines, "evaluate": evaluate_lines}


@dataclass
class Run:
    """What was measured so far, and how much time is left."""

    args: argparse.Namespace
    results: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def measure(self, part: str, name: str, job: Callable[[], dict[str, Any]]) -> None:
        """Run a part unless its time is over, print it, and write everything so far."""
        title = f"{part} {name}"
        if time.monotonic() - self.begun > self.args.seconds:
            self.left_out.append(title)
            print(f"\n{title}: left out, because {self.args.seconds} s are over")
            return
        print(f"\n{title}", flush=True)
        start = time.monotonic()
        result: dict[str, Any] = {"part": part}
        try:
            result |= job()
            lines = LINES[part](result)
        except Exception as error:  # the other parts are worth their time all the same
            traceback.print_exc()
            result["error"] = describe_error(error)
            lines = [f"failed: {result['error']}"]
        result["part_seconds"] = time.monotonic() - start
        print("\n".join(f"  {line}" for line in lines), flush=True)
        self.results.append(result)
        if self.args.output:
            content = {**describe_machine(), "results": self.results, "left_out": self.left_out}
            Path(self.args.output).write_text(json.dumps(content, indent=2) + "\n")


def main() -> int:
    args = parse()
    parts, names = args.parts.split(","), args.models.split(",")
    if unknown := sorted({*parts} - {*LINES}) + sorted({*names} - {*scale_models.SHAPES}):
        sys.exit(
            f"there is no {unknown[0]}: parts are {', '.join(LINES)}; "
            f"models are {', '.join(scale_models.SHAPES)}"
        )
    run = Run(args)
    matmul = scale_models.matmul_peak()
    machine = describe_machine()
    print(", ".join(map(str, machine.values())))
    print(f"a large bf16 matrix product: {matmul / 1e12:.0f} TFLOP/s")
    for number, name in enumerate(names):
        # All parts of the first model, and only the statistics of the others.
        chosen = [part for part in parts if number == 0 or part == "statistics"]
        if chosen:
            measure_model(run, name, chosen, matmul)
            free_memory()
    failed = [result["part"] for result in run.results if "error" in result]
    print(f"\n{time.monotonic() - run.begun:.0f} s in all")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def measure_model(run: Run, name: str, parts: list[str], matmul: float) -> None:
    """Make a model, and run the parts that use it."""
    args = run.args
    text = Text(args.tokens, args.length, args.batch)
    shape = scale_models.SHAPES[name]
    if args.layers:
        shape = replace(shape, layers=args.layers)
    bench = Bench.of(name, shape, scale_models.make_model(shape), text, matmul)
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        "statistics": lambda: measure_statistics(bench, args.repeats),
        "evaluate": lambda: measure_evaluate(bench, args.evaluate_length),
    }
    for part in parts:
        run.measure(part, name, jobs[part])


def describe_machine() -> dict[str, Any]:
    """What the figures hold for."""
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    return {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", default=",".join(LINES))
    parser.add_argument("--models", default=",".join(scale_models.SHAPES))
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--evaluate-length", type=int, default=32_768)
    parser.add_argument("--seconds", type=int, default=480)
    parser.add_argument("--output", help="a JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
