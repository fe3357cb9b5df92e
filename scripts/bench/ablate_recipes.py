"""What each step towards a recipe is worth in answers, on trained models with depth.

    python scripts/bench/ablate_recipes.py MODEL ... --text FOLDER --output FOLDER
        [--arms REGEX] [--names REGEX] [--settings 2048,chunks,8192] [--jobs 4] [--minutes M]

MODEL is a folder of `train_lab_models`; FOLDER of `--text` has calibration.jsonl and
evaluation.jsonl. Statistics are collected once for every model. Every arm has the same statistics,
questions and texts, so that all differences are paired; `ablation_tables` makes tables of them.
Models run in bfloat16, as they are served.

An arm is a closed form, whose recipe is `CLOSED`, another engine's cache (the job `rivals`), or a
cache of transformers. `+fb` after its name: keys and values are written by error feedback; `+keys`:
keys alone. Settings are prompts of 2,048 tokens, the same prefilled in chunks of 512 as OSCAR's
server writes them, and prompts of 8,192 tokens.

`--jobs` processes share each GPU. OUTPUT/PROCESS.jsonl gets a line for each arm and setting.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import queue
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cache_readers import Reader, answers_of, arm_of, exact, losses_of, rival_of, simulated, through
from measuring import make_parser

from rotationzoo.artifact.fit import error_metric, fit, sum_moments
from rotationzoo.artifact.layout import rotation_tensors, rotations_from
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.recipe_checks import settle_centering
from rotationzoo.calibration.sensitivity import measure_sensitivities, write_texts
from rotationzoo.codec import cuda
from rotationzoo.codec.budget import COARSE, spend_bits
from rotationzoo.codec.formats import FINE, SGLANG
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.evaluation.arms import Arm
from rotationzoo.evaluation.real_cache import ThroughCache
from rotationzoo.evaluation.tasks.prompts import TaskSettings, plan_tasks
from rotationzoo.geometry import Geometry, cached_rows, shifted_layers
from rotationzoo.linalg import error_feedback
from rotationzoo.linalg.moments import Statistics
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.source import find
from rotationzoo.progress import silent
from rotationzoo.recipe import Data, Recipe
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import SIDES, Rotation, Rotations
from rotationzoo.sides import HEADS, cost_kinds
from rotationzoo.simulation.rivals import ENGINE_CACHES, RivalCodec, store_as_kivi
from rotationzoo.simulation.simulated import Simulation
from rotationzoo.text.rows import read_corpus

SETTINGS: dict[str, tuple[int, int | None, int]] = {
    "2048": (2048, None, 96), "chunks": (2048, 512, 96), "8192": (8192, None, 64),
}  # fmt: skip
"""Setting -> tokens a prompt, tokens a chunk, questions a task."""
# What is cut off either end of a range, in `feedback.cu` and in the job `one range`.
RANGES, ONE_RANGE = "{0.0f, 0.05f, 0.1f, 0.15f}", "{0.0f, 0.0f, 0.0f, 0.0f}"
TEXTS, TEXT_LENGTH = 16, 2048  # plain text, for the perplexity
CALIBRATION = {"tokens": 262_144, "length": 4096, "packing": "mixed"}

CLOSED: dict[str, dict[str, Any]] = {
    "oscar": {},
    "oscar by layer": {"pooling": "layer"},
    "hadamard": {"composition": "hadamard"},
    "random": {"composition": "random"},
    "oscar centered": {"center_keys": True},
    "oscar centered by layer": {"center_keys": True, "pooling": "layer"},
    "hadamard centered": {"center_keys": True, "composition": "hadamard"},
    "random centered": {"center_keys": True, "composition": "random"},
    "oscar-v1": {"pooling": "layer", "value_statistic": "key_energy", "exclude_sink": False},
    "identity": {"composition": "identity"},
}
"""Name -> what its recipe changes of `oscar`; each is an arm with nearest codes, and one with error
feedback."""
WHITENED: dict[str, tuple[str, float]] = {
    f"{composition} whitened {share:g}": (composition, share)
    for composition, share in (
        ("hadamard", 0), ("hadamard", 0.5), ("hadamard", 0.75), ("hadamard", 1), ("r_h_pbr", 0.5),
        ("random", 0.5),
    )
}  # fmt: skip
"""Name -> composition, and the share of the way to white rows, of centered recipes that are written
by error feedback alone, in every format of `STORED`."""
STORED = {
    "": SGLANG,
    ", one scale": replace(FINE, fine_channels=0),
    ", 2.25 bits": replace(FINE, fine_channels=16),
    ", fine": FINE,
    ", budget": FINE,
    ", 3 bits": replace(FINE, fine_channels=112),
    ", 3-bit codes": replace(SGLANG, bits=3),
    ", 4-bit codes": replace(SGLANG, bits=4),
}
"""What the name of an arm ends with -> its format. At heads of 128 the first ones have 2.5, 2.125,
2.5 and 3 bits an element; smaller heads have more."""
BUDGETS = {
    f"{composition} whitened 0.5, {bits:g} bits{how}": (composition, bits, how)
    for composition, bits, how in (
        ("r_h_pbr", 2.25, ""), ("r_h_pbr", 2.5, ""), ("r_h_pbr", 3, ""), ("hadamard", 2.5, ""),
        ("r_h_pbr", 2.5, " by answers"), ("r_h_pbr", 2.5, " half and half"),
    )
}  # fmt: skip
"""Name -> composition, the bits of a budget, and how they are spent: by predictions of text, or by
answers, or with as many bits for keys as for values."""
CLIPS = {
    f"{name}, clip {key:g}/{value:g}": (key, value)
    for name in ("oscar", "oscar-v1")
    for key, value in ((0.88, 0.88), (0.92, 0.92), (1.0, 1.0), (0.98, 0.96))
}
"""Name -> other clip ratios. Error feedback searches ranges, and has none."""
FEEDBACK = "+fb"
DEFAULT = "oscar centered"
"""The closed form that is changed one step at a time."""


@dataclass(frozen=True)
class Questions:
    """What every arm is asked in one setting."""

    cache: CacheLayout
    length: int
    series: list[Any]
    batch: int


class Study:
    """One model on one device, with its statistics and questions."""

    def __init__(self, folder: Path, text: Path, work: Path, device: str, small: bool):
        self.name, self.work, self.text, self.small = folder.name, work, text, small
        source = find(str(folder))
        config = loading.load_config(source)
        self.model = loading.load(source, config, torch.device(device), torch.bfloat16)
        self.tokenizer = loading.load_tokenizer(source)
        data = Data(source=str(text / "calibration.jsonl"), **CALIBRATION)
        if small:
            data = data.model_copy(update={"tokens": 8192, "length": 1024})
        self.data = data
        self.corpus = read_corpus(data, self.tokenizer)
        geometry = geometry_on_meta(loading.on_meta(config, source.name))
        assert geometry is not None
        self.geometry: Geometry = geometry

    @functools.cached_property
    def loaded(self) -> Any:
        """As `cache_readers` takes it."""
        return argparse.Namespace(model=self.model, geometry=self.geometry)

    @functools.cache  # noqa: B019 (a process has one study at a time)
    def statistics(self, published: bool = False) -> Statistics:
        """The statistics of everything, or those of the published recipe, which counts the sink
        and weights values by key energy. Kept on disk for other processes."""
        path = self.work / f"{self.name}.{'published' if published else 'all'}.pt"
        if not path.exists():
            recipe = Recipe(feedback=True)
            if published:
                recipe = PRESETS["oscar-v1"].model_copy(update={"feedback": True})
            statistics = collect(self.model, self.geometry, self.corpus.batches(8), recipe)
            statistics = {
                layer: {kind: moment.to(torch.device("cpu")) for kind, moment in moments.items()}
                for layer, moments in statistics.items()
            }
            torch.save(statistics, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        return torch.load(path, weights_only=False)

    @functools.cache  # noqa: B019
    def questions(self, setting: str) -> Questions:
        length, chunk, questions = SETTINGS[setting]
        if self.small:
            length, questions = 1024 if length == 2048 else 2048, 4
        cache = CacheLayout(prefill_chunk=chunk)
        farthest = replace(cache, recent=cache.recent + 64)  # `kivi` keeps more of the end exact
        data = Data(source=str(self.text / "evaluation.jsonl"), tokens=32 * length, length=length)
        text = read_corpus(data, self.tokenizer)
        plan = plan_tasks(TaskSettings(questions=questions), data, text, self.tokenizer, [farthest])
        batch = 32 * 2048 // length
        if self.model.config._attn_implementation == "eager":  # it holds all scores of a layer
            batch = 8 * 2048**2 // length**2
        return Questions(cache, length, plan.series, max(1, batch))

    @functools.cached_property
    def texts(self) -> torch.Tensor:
        data = Data(source=str(self.text / "evaluation.jsonl"), tokens=TEXTS * TEXT_LENGTH, seed=1)
        rows = read_corpus(data, self.tokenizer).rows
        return torch.stack(rows[: 2 if self.small else TEXTS]).to(self.model.device)

    def rotations(self, name: str, **changes: Any) -> Rotations:
        """The rotations of a closed form, with the factors of error feedback."""
        keys = {"feedback": True, **CLOSED[name], **changes}
        recipe, _ = settle_centering(Recipe(**keys), shifted_layers(self.geometry))
        return fit(self.statistics(name == "oscar-v1"), recipe, self.geometry)

    @functools.cache  # noqa: B019
    def sensitive(self, composition: str, by_answers: bool) -> Rotations:
        """Whitened rotations that know what each layer loses, in predictions of the calibration
        text or in answers about it. Kept on disk for other processes."""
        path = self.work / f"{self.name}.{composition}.{by_answers}.pt"
        if not path.exists():
            rotations = self.rotations(DEFAULT, composition=composition, whiten=True)
            texts = write_texts(self.corpus.rows, Recipe(feedback=True), None)
            measured = (
                lose_answers(self, rotations)
                if by_answers
                else measure_sensitivities(
                    self.model, self.geometry, rotations, texts, None, silent
                )
            )
            torch.save(rotation_tensors(measured), path.with_suffix(f".{os.getpid()}"))
            path.with_suffix(f".{os.getpid()}").rename(path)
        return rotations_from(torch.load(path))


def lose_answers(study: Study, rotations: Rotations) -> Rotations:
    """The rotations, whose sensitivities are nats lost of the answers to questions about the
    calibration text."""
    length = 1024 if study.small else 2048
    data = Data(source=str(study.text / "calibration.jsonl"), tokens=32 * length, length=length)
    text, cache = read_corpus(data, study.tokenizer), CacheLayout(COARSE)
    plan = plan_tasks(TaskSettings(questions=24), data, text, study.tokenizer, [cache])
    prompts = [prompt for each in plan.series for prompt in each.prompts]
    codec = RotatedCodec(rotations, rounding="feedback")

    def lose(layer: int, side: str, rotation: Rotation) -> Rotation:
        simulation = Simulation(codec, cache, study.geometry, {layer}, (side,))
        with torch.no_grad(), simulation.running(study.model):
            stored = answers_of(study.model, prompts, 32).log_probability
        loss = (wanted - stored)[right].double().mean().nan_to_num(0).clamp(min=0)
        return replace(rotation, sensitivity=loss.cpu())

    with torch.no_grad():
        answers = answers_of(study.model, prompts, 32)
    right, wanted = answers.correct.bool(), answers.log_probability
    return rotations.replace(lose)


def both(name: str, rotations: Rotations) -> Iterator[Arm]:
    """An arm with nearest codes, and one with error feedback."""
    yield arm_of(name, rotations)
    yield arm_of(name + FEEDBACK, rotations, rounding="feedback")


def damped(study: Study, rotations: Rotations, damping: float) -> Rotations:
    """The rotations with factors that are damped otherwise."""
    statistics = study.statistics()

    def change(layer: int, side: str, rotation: Rotation) -> Rotation:
        moment = sum_moments(statistics[layer], cost_kinds(side))
        factor = error_feedback.factorize(error_metric(rotation, moment))
        return replace(rotation, feedback=factor)

    with patch.object(error_feedback, "DAMPING", damping):
        return rotations.replace(change)


def without(side: str, rotations: Rotations) -> Rotations:
    """The rotations whose factors of one side are those of the identity: its codes are rounded one
    by one, with the ranges searched."""

    def change(layer: int, its_side: str, rotation: Rotation) -> Rotation:
        if its_side != side:
            return rotation
        identity = torch.eye(rotation.dim).expand(len(rotation.clip), -1, -1)
        return replace(rotation, feedback=identity.contiguous())

    return rotations.replace(change)


def closed_arms(name: str, study: Study) -> Iterator[Arm]:
    yield from both(name, study.rotations(name))


def stored_arms(name: str, study: Study) -> Iterator[Arm]:
    composition, share = WHITENED[name]
    with patch.object(error_feedback, "SHARE", share):
        rotations = study.rotations(DEFAULT, composition=composition, whiten=share > 0)
    for stored in STORED:
        yield arm_of(f"{name}{FEEDBACK}{stored}", rotations, rounding="feedback")


def code_arms(codes: str, study: Study) -> Iterator[Arm]:
    """No rotation, and Hadamard and the default with each writer, in codes of some bits."""
    for name in ("hadamard centered", DEFAULT):
        rotations = study.rotations(name, whiten=True)
        yield arm_of(f"{name} whitened{FEEDBACK}{codes}", rotations, rounding="feedback")
    for name in ("hadamard centered", DEFAULT, "identity"):
        yield arm_of(f"{name} written nearest{codes}", study.rotations(name))


def budget_arms(name: str, study: Study) -> Iterator[Arm]:
    composition, bits, how = BUDGETS[name]
    budget = {"bits": bits} if "half" not in how else {"key_bits": bits, "value_bits": bits}
    measured = study.sensitive(composition, "answers" in how)
    rotations = spend_bits(measured, Recipe(feedback=True, **budget))
    spent = {side: [] for side in SIDES}
    for _, side, rotation in rotations.each():
        spent[side].append(rotation.fine_channels.item())
    print(f"{study.name}, {name}: {spent}", flush=True)
    yield arm_of(f"{name}{FEEDBACK}, budget", rotations, rounding="feedback")
    yield arm_of(f"{name}, nearest, budget", rotations)


def clip_arms(name: str, study: Study) -> Iterator[Arm]:
    key, value = CLIPS[name]
    base = name.partition(",")[0]
    yield arm_of(name, study.rotations(base, key_clip=key, value_clip=value))


def constant_arms(study: Study) -> Iterator[Arm]:
    """The constants of error feedback, one changed at a time."""
    rotations = study.rotations(DEFAULT)
    for damping in (0.001, 0.1):
        changed = damped(study, rotations, damping)
        yield arm_of(f"{DEFAULT}+fb, damping {damping:g}", changed, rounding="feedback")


def range_arms(study: Study) -> Iterator[Arm]:
    """Error feedback with one range: the kernel is compiled from a changed source."""
    if study.model.device.type == "cuda":
        changed = study.work / f"one-range.{os.getpid()}.cu"
        changed.write_text(cuda.FEEDBACK_SOURCE.read_text().replace(RANGES, ONE_RANGE))
        cuda.compiled.cache_clear()
        with patch.object(cuda, "FEEDBACK_SOURCE", changed):
            name = f"{DEFAULT}+fb, cuts {ONE_RANGE}"
            yield arm_of(name, study.rotations(DEFAULT), rounding="feedback")
        cuda.compiled.cache_clear()


def side_arms(study: Study) -> Iterator[Arm]:
    """Error feedback for one side."""
    rotations = study.rotations(DEFAULT)
    yield arm_of(f"{DEFAULT}+keys", without("value", rotations), rounding="feedback")
    yield arm_of(f"{DEFAULT}+values", without("key", rotations), rounding="feedback")
    neither = without("key", without("value", rotations))
    yield arm_of(f"{DEFAULT}, ranges alone", neither, rounding="feedback")


def kivi_arms(study: Study) -> Iterator[Arm]:
    yield rival_of("kivi-64", RivalCodec(functools.partial(store_as_kivi, tokens=64, channels=64)))


def rival_arms(study: Study) -> Iterator[Arm]:
    """Other engines' caches, which need no statistics, with the exact windows of all arms."""
    for name in ENGINE_CACHES:
        yield rival_of(name, RivalCodec.of_engine(name))


ARMS: dict[str, Callable[[Study], Iterator[Arm]]] = {
    "rivals": rival_arms,  # the longest jobs come first
    **{name: functools.partial(stored_arms, name) for name in WHITENED},
    **{name: functools.partial(closed_arms, name) for name in CLOSED},
    **{name: functools.partial(budget_arms, name) for name in BUDGETS},
    **{name: functools.partial(clip_arms, name) for name in CLIPS},
    "codes": functools.partial(code_arms, ""),
    "3-bit codes": functools.partial(code_arms, ", 3-bit codes"),
    "4-bit codes": functools.partial(code_arms, ", 4-bit codes"),
    "kivi": kivi_arms,
    "sides": side_arms,
    "constants": constant_arms,
    "one range": range_arms,
}
"""Job -> its arms. Every reader of `READERS` is a job, too."""


def read_stored(study: Study, questions: Questions) -> Reader:
    """The default recipe, read from a cache that stores 2 bits."""
    arm = arm_of(DEFAULT, study.rotations(DEFAULT), rounding="feedback")
    bits = simulated(study.loaded, arm, questions.cache, questions.length).bits
    return Reader(ThroughCache(study.model, arm.codec, questions.cache), nullcontext, bits)


def read_library(name: str, study: Study, questions: Questions) -> Reader:
    return through(study.loaded, name, questions.cache, questions.length)


LIBRARIES = ("hqq-2", "quanto-2", "hqq-2-per-token", "quanto-2-per-channel")
READERS: dict[str, tuple[Callable[[Study, Questions], Reader], tuple[str, ...]]] = {
    "RotatedCache": (read_stored, ("2048", "chunks")),
    **{name: (functools.partial(read_library, name), ("2048", "8192")) for name in LIBRARIES},
}
"""Arm that is no simulation -> what reads it, and the settings in which it is asked. Without chunks
`RotatedCache` reads token by token, which takes as many calls as there are tokens; the caches of
transformers are no servers and have no chunks."""


def ask(
    reader: Reader, questions: Questions, batch: int | None = None, blind: bool = False
) -> dict[str, Any]:
    """What was answered, task by task. The prompts of all tasks share batches; `blind` ones, which
    lack their statements, have another length in every task."""
    tasks = {}
    for group in [[each] for each in questions.series] if blind else [questions.series]:
        asked = {each.task: each.blind if blind else each.prompts for each in group}
        prompts = list(itertools.chain.from_iterable(asked.values()))
        with torch.no_grad(), reader.context():
            answers = answers_of(reader.model, prompts, batch or questions.batch)
        correct = "".join(map(str, answers.correct.int().tolist()))
        logs = [round(x, 4) for x in answers.log_probability.tolist()]
        start = 0
        for task, its_prompts in asked.items():
            sizes = [len(prompt.questions) for prompt in its_prompts]
            part = slice(start, start := start + sum(sizes))
            tasks[task] = {
                "correct": correct[part], "log_probabilities": logs[part], "prompts": sizes,
            }  # fmt: skip
    return tasks


def read_texts(study: Study, reader: Reader, first: int) -> list[float]:
    losses = []
    with torch.no_grad(), reader.context():
        for ids in study.texts.split(8):
            losses.append(losses_of(reader.model, ids, first).double().mean(1).cpu())
    return torch.cat(losses).tolist()


def run_job(
    study: Study, job: str, settings: list[str], names: str, write: Callable[..., None]
) -> None:
    """Measure the arms of a job whose names match, in every setting; `write` gets what was
    measured."""
    if job == "exact":
        reader = exact(study.loaded)
        for setting in settings:
            questions = study.questions(setting)
            losses = read_texts(study, reader, questions.cache.first_quantized)
            tasks = ask(reader, questions)
            blind = ask(reader, questions, blind=True)
            write(setting=setting, arm=job, bits=16, tasks=tasks, text_losses=losses, blind=blind)
        return
    if job in READERS:
        read, asked = READERS[job]
        for setting in settings:
            if setting in asked:
                questions = study.questions(setting)
                reader = read(study, questions)
                # A cache that is really filled takes as many calls for many prompts as for few.
                tasks = ask(reader, questions, batch=2 * questions.batch)
                write(setting=setting, arm=job, bits=reader.bits, tasks=tasks)
        return
    for arm in ARMS[job](study):
        if not re.search(names, arm.name):
            continue
        for setting in settings:
            questions = study.questions(setting)
            stored = next(end for end in sorted(STORED, reverse=True) if arm.name.endswith(end))
            cache = replace(questions.cache, format=STORED[stored])
            reader = simulated(study.loaded, arm, cache, questions.length)
            tasks = ask(reader, questions)
            losses = read_texts(study, reader, questions.cache.first_quantized)
            line = {"setting": setting, "arm": arm.name, "bits": reader.bits, "tasks": tasks}
            write(**line, text_losses=losses)


def write_line(path: Path, **line: Any) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")


def work_through(options: argparse.Namespace, device: str, number: int, queues: Any) -> None:
    """A process: takes jobs from its queue, then from the others."""
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("highest")
    if device != "cpu":
        torch.cuda.set_device(device)
    path = options.output / f"part-{number}.jsonl"
    study: Study | None = None
    for turn in range(len(queues)):
        jobs = queues[(number + turn) % len(queues)]
        while time.time() < options.deadline:
            try:
                folder, job = jobs.get(timeout=0.2)
            except queue.Empty:
                break
            try:
                if study is None or study.name != folder.name:
                    study = None
                    study = Study(folder, options.text, options.work, device, options.small)
                started = time.time()
                write = functools.partial(write_line, path, model=study.name)
                run_job(study, job, options.settings, options.names, write)
                seconds = time.time() - started
                left = options.deadline - time.time()
                print(f"{study.name}, {job}: {seconds:.0f} s; {left:.0f} s left", flush=True)
            except Exception:
                print(f"{folder.name}, {job} failed", file=sys.stderr)
                traceback.print_exc()


def collect_first(options: argparse.Namespace, device: str, folder: Path) -> None:
    """Collect a model's statistics for all processes."""
    torch.set_num_threads(4)
    if device != "cpu":
        torch.cuda.set_device(device)
    started = time.time()
    study = Study(folder, options.text, options.work, device, options.small)
    study.statistics()
    if cached_rows(study.geometry) is HEADS:  # the published recipe is one for heads
        study.statistics(True)
    with torch.no_grad():
        towering = describe_queries(study.statistics())
    print(f"{folder.name}: statistics in {time.time() - started:.0f} s; {towering}", flush=True)


def describe_queries(statistics: Statistics) -> str:
    """The effective rank of `C_Q` over D, and the share of its strongest direction: medians over
    the layers, of moments averaged over heads."""
    ranks, shares = [], []
    for moments in statistics.values():
        values = torch.linalg.eigvalsh(moments["query"].second_moment.mean(0)).clamp(min=0)
        spectrum = values / values.sum()
        ranks.append(torch.special.entr(spectrum).sum().exp().item() / len(spectrum))
        shares.append(spectrum[-1].item())
    rank, share = (sorted(numbers)[len(numbers) // 2] for numbers in (ranks, shares))
    return f"C_Q: effective rank {rank:.2f} D, strongest {share:.2f}"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="for statistics; OUTPUT by default")
    parser.add_argument("--arms", default="", help="jobs whose names match")
    parser.add_argument("--names", default="", help="arms of these jobs whose names match")
    parser.add_argument("--settings", type=lambda text: text.split(","), default=list(SETTINGS))
    parser.add_argument("--jobs", type=int, default=4, help="processes a GPU")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--small", action="store_true", help="a few questions, to try it out")
    options = parser.parse_args()
    options.deadline = time.time() + 60 * options.minutes
    options.work = options.work or options.output
    for folder in (options.output, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    devices = [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    context = multiprocessing.get_context("spawn")

    def run_all(target: Callable[..., None], jobs: list[tuple[Any, ...]]) -> None:
        """Run processes at the same time, on the devices in turn."""
        processes = [
            context.Process(target=target, args=(options, devices[n % len(devices)], *job))
            for n, job in enumerate(jobs)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()

    run_all(collect_first, [(folder,) for folder in options.models])
    names = [name for name in (*READERS, *ARMS) if re.search(options.arms, name)]
    queues = []
    for folder in options.models:
        jobs = context.Queue()
        for name in ("exact", *names):
            jobs.put((folder, name))
        queues.append(jobs)
    run_all(work_through, [(n, queues) for n in range(options.jobs * len(devices))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
