"""What caches keep of a real model's answers: "Judged" in docs/results.md and "Real models" in
docs/history.md.

    python scripts/bench/real_models_lose.py MODEL ROTATIONS ... [--split dev] [--json OUT]

MODEL is a folder of `real_models`; ROTATIONS are artifacts with transform coding. Parts, in the
order in which they run:

    k  caches that take no rotation of ours
    o  artifacts in caches that simulate what `RotatedCache` and vLLM store of them, as they are or
       in each of the --bits; and of transform coding, a Hadamard matrix in as many bits

Everything is compared with the exact model: answers that it
gives and that are kept, nats of log probability of the right answers, and KL a token on plain text
of 2,048 tokens. Bits count scales.

--json is written after every arm; arms that it holds already are not measured again. No arm is
begun after --seconds.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from measuring import DEVICE, make_parser

from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.codec.formats import SGLANG
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import UsageError
from rotationzoo.evaluation.arms import KIVI, RIVALS, build_arms, build_baselines
from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.prediction import HiddenStates, divergence_of, run_decoder
from rotationzoo.model.source import fetch, find
from rotationzoo.recall.prompts import Answers, Prompt, join_answers, read_answers
from rotationzoo.simulation.rivals import check_engine_cache
from rotationzoo.simulation.simulated import SimulatedCodec, Simulation

sys.path.append(str(Path(__file__).parents[1] / "lab"))  # scripts are no package
from real_questions import CHAT, LENGTHS, SPLITS, TASKS, Split

Place = tuple[int, str]
"""A layer and a side."""
OTHERS = ("exl3-2", KIVI, "turboquant_3bit_nc", "exl3-3", "q4_0", "fp8")
"""Arms of part k, by the bits that they take."""
TEXT_LENGTH = 2048


def elements_of(geometry: Geometry) -> dict[Place, int]:
    """Elements of a token at each place."""
    return {
        (layer.index, side): layer.kv_heads * layer.dims[side]
        for layer in cached_layers(geometry)
        for side in layer.sides
    }


class Study:
    """The exact model's answers and predictions, and those of every arm."""

    def __init__(self, options: argparse.Namespace):
        source = find(str(options.model))
        fetch(source)
        config = loading.load_config(source)
        self.options = options
        self.model = loading.load(source, config, DEVICE, torch.float32)
        self.tokenizer = loading.load_tokenizer(source)
        self.geometry = geometry_of(self.model)
        self.cache = CacheLayout(SGLANG, options.sink, options.recent)
        split = SPLITS[options.split]
        self.prompts = {
            (length, task): self._write(split, task, length, range(options.questions))
            for length in options.lengths
            for task in options.tasks
        }
        self.length = min(TEXT_LENGTH, max(options.lengths))
        self.texts = self._rows(split)[: options.rows]

    def _write(self, split: Split, task: str, length: int, asked: range) -> list[Prompt]:
        return split.prompts(self.tokenizer, task, length, asked, self.cache)

    def _rows(self, split: Split) -> torch.Tensor:
        return torch.tensor(split.rows(self.tokenizer, self.length))

    def reading(self, codec: SimulatedCodec | None) -> Any:
        """The context in which the model reads what a codec stores, or what it computes itself."""
        if codec is None:
            return nullcontext()
        layers = {layer.index for layer in self.geometry}
        return Simulation(codec, self.cache, self.geometry, layers).running(self.model)

    def ask(self) -> dict[str, Any]:
        """What was answered, by length and task. All tasks of a length share batches."""
        told: dict[str, Any] = {}
        for length in sorted({length for length, _ in self.prompts}):
            tasks = {task: its for (of, task), its in self.prompts.items() if of == length}
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

    def predict(self, texts: torch.Tensor) -> list[HiddenStates]:
        """Of batches of texts `[N, T]`."""
        size = max(1, self.options.tokens // texts.shape[1])
        with torch.no_grad():
            return [run_decoder(self.model, ids) for ids in texts.split(size)]

    def logits(self, states: Iterable[HiddenStates]) -> Iterator[torch.Tensor]:
        """In blocks, those of the queries that read anything in few bits."""
        for each in states:
            for _, logits in each.blocks(self.cache.first_quantized, each.ids.shape[1]):
                yield logits

    @cached_property
    def exact_states(self) -> list[HiddenStates]:
        return self.predict(self.texts)

    @torch.no_grad()
    def divergence(self, codec: SimulatedCodec) -> float:
        """`KL(exact || stored)`, in nats a token, of the queries that read anything in few bits."""
        exact = self.logits(self.exact_states)
        with self.reading(codec):
            read = self.predict(self.texts)
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

    def bits(self, codec: SimulatedCodec) -> float:
        """Bits an element of the quantized tokens, scales counted; exact sides have 16."""
        elements = elements_of(self.geometry)
        stored = 0.0
        for layer in cached_layers(self.geometry):
            for side in layer.sides:
                its = codec.stored_bits(layer.index, side, layer.dims[side], SGLANG)
                stored += elements[layer.index, side] * its
        return stored / sum(elements.values())


def _tell(answers: Answers, part: slice) -> dict[str, Any]:
    digits = map(str, answers.correct[part].int().tolist())
    logs = [round(value, 4) for value in answers.log_probability[part].tolist()]
    return {"correct": "".join(digits), "log_probabilities": logs}


def _pool(told: Mapping[str, Any], length: str | None = None) -> tuple[str, list[float]]:
    """The answers to all questions, or to those of one length."""
    lengths = told if length is None else [length]
    each = [reply for of in lengths for reply in told[of].values()]
    logs = itertools.chain.from_iterable(reply["log_probabilities"] for reply in each)
    return "".join(reply["correct"] for reply in each), list(logs)


def kept_and_nats(
    arm: Mapping[str, Any], exact: Mapping[str, Any], length: str | None = None
) -> tuple[int, int, float]:
    """How many of the exact model's answers an arm gives, how many it gives in all, and the mean
    log probability of the right ones."""
    (mine, logs), (its, _) = _pool(arm["tasks"], length), _pool(exact["tasks"], length)
    kept = sum(pair == ("1", "1") for pair in zip(mine, its, strict=True))
    return kept, mine.count("1"), sum(logs) / len(logs)


class Run:
    """Measures arm after arm, prints a row for each, and keeps all of them in a file."""

    def __init__(self, study: Study, options: argparse.Namespace, begun: float):
        self.study, self.options, self.begun = study, options, begun
        names = ("split", "questions", "lengths", "rows")
        windows = {"sink": options.sink, "recent": options.recent}
        settings: dict[str, Any] = {name: getattr(options, name) for name in names} | windows
        settings |= {"model": options.model.name, "tf32": options.tf32}
        settings["rotations"] = [folder.resolve().name for folder in options.rotations]
        self.kept: dict[str, Any] = {"settings": settings, "exact": None, "arms": {}}
        if options.json and options.json.exists():
            earlier = json.loads(options.json.read_text())
            if earlier["settings"] != settings:
                sys.exit(f"{options.json} holds what was measured with other settings")
            self.kept = earlier
        if self.kept["exact"] is None:
            self.kept["exact"] = study.measure(None)
        self.write()

    def write(self) -> None:
        if self.options.json:
            part = self.options.json.with_suffix(".part")
            part.write_text(json.dumps(self.kept))
            part.rename(self.options.json)

    @property
    def is_over(self) -> bool:
        return time.perf_counter() - self.begun > self.options.seconds

    def measure(self, name: str, codec: SimulatedCodec) -> None:
        """Measure and print an arm, if there is time."""
        arms = self.kept["arms"]
        if name not in arms:
            if self.is_over:
                return
            started = time.perf_counter()
            told = {**self.study.measure(codec), "bits": self.study.bits(codec)}
            told["seconds"] = round(time.perf_counter() - started, 2)
            arms[name] = told
            self.write()
        self.print_row(name, arms[name])

    def print_row(self, name: str, arm: Mapping[str, Any]) -> None:
        exact = self.kept["exact"]
        kept, answered, nats = kept_and_nats(arm, exact)
        bits = f"{arm['bits']:.3f}" if "bits" in arm else "16"
        cells = [name, bits, f"{arm['kl']:.5f}", str(kept), str(answered), f"{nats:.3f}"]
        for length in arm["tasks"]:
            kept, _, nats = kept_and_nats(arm, exact, length)
            cells.append(f"{kept}; {nats:.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)

    def head(self, title: str) -> None:
        """The head of a table."""
        lengths = [f"{int(length):,}" for length in self.kept["exact"]["tasks"]]
        names = ["arm", "bits", "KL", "kept", "right", "nats", *lengths]
        print(f"\n{title}\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
        self.print_row("exact", self.kept["exact"])


class Parts:
    """The tables."""

    def __init__(self, run: Run, artifacts: Sequence[Artifact]):
        self.run, self.study, self.artifacts = run, run.study, artifacts

    def rivals(self) -> None:
        self.run.head("k. Caches that take no rotation of ours")
        geometry, able = self.study.geometry, []
        for name in OTHERS:
            try:
                if name in RIVALS:
                    check_engine_cache(name, geometry)
                able.append(name)
            except UsageError as error:
                print(error)
        arms = build_baselines(self.artifacts[0].recipe, geometry, able)
        for arm in sorted(arms, key=lambda arm: self.study.bits(arm.codec)):
            self.run.measure(arm.name, arm.codec)

    def as_they_are(self) -> None:
        self.run.head("o. Artifacts")
        for artifact in self.artifacts:
            for bits in self.run.options.bits or (None,):
                budgets = (Budget(bits) or None,)
                arms = build_arms([artifact], self.study.geometry, ["hadamard"], budgets=budgets)
                for arm in arms:
                    if arm.about.rounding != "nearest":
                        stored = "as it is" if bits is None else f"in {bits:g} bits"
                        name = f"{artifact.folder.resolve().name} {stored}: {arm.name}"
                        self.run.measure(name, arm.codec)


PARTS: dict[str, Callable[[Parts], None]] = {
    "k": Parts.rivals,
    "o": Parts.as_they_are,
}


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("rotations", type=Path, nargs="+")
    parser.add_argument("--split", choices=SPLITS, default="dev")
    parser.add_argument("--json", type=Path, help="where to keep what is measured")
    parser.add_argument("--seconds", type=float, default=400, help="no arm is begun later")
    parser.add_argument("--parts", default="".join(PARTS), help="letters, as above")
    parser.add_argument("--bits", type=float, nargs="+", help="budgets of part o")
    parser.add_argument("--questions", type=int, default=64, help="of each task and length")
    parser.add_argument(
        "--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[*LENGTHS]
    )
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS, CHAT), default=TASKS)
    parser.add_argument("--rows", type=int, default=8, help="texts for the KL")
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--recent", type=int, default=256)
    parser.add_argument(
        "--tokens", type=int, default=65536 if DEVICE == "cuda" else 4096, help="a forward pass"
    )
    parser.add_argument("--tf32", action="store_true", help="products of fewer bits: faster")
    return parser


def main() -> int:
    options, begun = make_options().parse_args(), time.perf_counter()
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    artifacts = [Artifact.open(folder) for folder in options.rotations]
    study = Study(options)
    run = Run(study, options, begun)
    ready = time.perf_counter() - begun
    print(f"{json.dumps(run.kept['settings'])}\n{DEVICE}, ready after {ready:.0f} s", flush=True)
    parts = Parts(run, artifacts)
    for letter in (letter for letter in PARTS if letter in options.parts):
        PARTS[letter](parts)
    print(f"\n{time.perf_counter() - begun:.0f} s{', cut short' if run.is_over else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
