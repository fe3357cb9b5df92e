"""What recipes, KIVI and transformers' own caches answer: calibrate arms on one text, and ask the
model about another.

    python scripts/benchmark_answers.py MODEL --output FOLDER [--part NAME] [--arms "A;B"]
        [--settings S,T] [--questions 128] [--fewer 64] [--calibration FILE --label TEXT]
        [--calibration-seed N]

Arms are the recipes of `answer_recipes`, `identity`, `random`, `kivi-32`, `kivi-64`, and the
caches of `transformers_caches`. Every recipe has the same calibration text. `-clip` in a name means
that clip ratios were chosen by the search that `best` uses. An artifact with factors of error
feedback is two arms: NAME has the nearest codes, NAME+feedback those that are chosen together.

Settings: `2048`, `4096` and `8192` tokens a prompt; `chunks` (2048 tokens, prefilled in chunks of
512 as OSCAR's server writes them); and `equal` (2048 tokens in the 2-bit format that takes as many
bytes as the 2-bit caches of transformers, which are measured there alone).

The arms of `answer_recipes.MOST` answer all questions, the others the first of them. FOLDER gets
the artifacts and, after every arm, the answers so far as `MODEL.PART.json`. `compare_answers` makes
tables from such files, whatever arms and settings each of them has.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from answer_recipes import ARMS, BASE, BASELINES, DEFAULT, FEEDBACK, LIBRARIES, MOST, recipes
from cache_readers import Reader, answers_of, exact, list_kivi, losses_of, simulated, through
from loading import DEVICE, Loaded, load

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import rotations_for
from rotationzoo.cache.arm import Arm
from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.codec import int2
from rotationzoo.codec.formats import FORMATS, SGLANG, VLLM, Format
from rotationzoo.evaluation.arms import build_baselines, shared_recipe
from rotationzoo.evaluation.tasks.answering import ExactAnswers
from rotationzoo.evaluation.tasks.prompts import TaskPlan, plan_tasks
from rotationzoo.evaluation.tasks.settings import TaskSettings
from rotationzoo.model import loading
from rotationzoo.model.source import find
from rotationzoo.recall.prompts import TASKS
from rotationzoo.recipe import Data, Recipe
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import read_corpus

SETTINGS: dict[str, tuple[int, int | None]] = {
    "2048": (2048, None), "equal": (2048, None), "chunks": (2048, 512), "8192": (8192, None),
    "4096": (4096, None),
}  # fmt: skip
"""Setting -> tokens a prompt, and tokens a chunk."""
TEXTS = 32768  # tokens of plain text, for the perplexity
LIBRARY_TEXTS = 4  # rows of it for the caches of transformers
LONG = 4096  # tokens of a prompt beyond which all arms are asked as few questions
GROUPED = 64  # tokens by which `kivi-64` and transformers' caches keep more of the end exact
Record = dict[str, Any]


@dataclass(frozen=True)
class Questions:
    """What every arm is asked in one setting."""

    setting: str
    cache: Cache
    length: int
    plan: TaskPlan
    texts: torch.Tensor
    """Rows `[N, T]` of plain text."""
    start: int
    """The first position whose loss counts."""
    batch: int
    """Rows a forward pass."""


@dataclass
class Run:
    """One model with the artifacts that it has so far."""

    options: argparse.Namespace
    model: str
    loaded: Loaded
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    calibrations: Record = field(default_factory=dict)
    """What each calibration chose, and its seconds."""

    def arms(self, name: str, questions: Questions) -> Iterator[tuple[str, Reader]]:
        """The arms that a name stands for: one, or two where an artifact has factors."""
        reader = partial(simulated, self.loaded, cache=questions.cache, length=questions.length)
        if name in LIBRARIES:
            yield name, through(self.loaded, name, questions.cache, questions.length)
        elif name in BASELINES:
            shared = shared_recipe([self.artifacts[BASE]] if BASE in self.artifacts else [])
            plain = build_baselines(shared, self.loaded.geometry)[:-1]
            table = {arm.name: arm for arm in [*plain, *list_kivi(plain)]}
            yield name, reader(arm=table[name])
        else:
            if name not in self.artifacts:
                self.artifacts[name] = self.calibrate(name)
            artifact, title = self.artifacts[name], name + self.options.label
            rotations = rotations_for(artifact, find(self.model))
            arm = Arm(title, rotations, artifact.recipe.group_size)
            yield title, reader(arm=arm)
            first = questions.setting == self.options.settings[0]
            if rotations.has_feedback and (first or name + FEEDBACK in MOST):
                together = replace(arm, name=title + FEEDBACK, rounding="feedback")
                yield together.name, reader(arm=together)

    def calibrate(self, name: str) -> Artifact:
        """An arm's artifact, calibrated now unless its folder exists."""
        options, recipe = self.options, recipes()[name]
        folder = options.output / Path(self.model).name / _slug(name + options.label)
        started = time.monotonic()
        recipe = _with_options(recipe, options)
        job = Job(self.model, recipe, folder, dtype="float32", batch=options.calibration_batch)
        artifact = calibrate(job)
        followed = artifact.recipe
        self.calibrations[name + options.label] = chosen = {
            "seconds": round(time.monotonic() - started),
            "clips": list(artifact.clip_ratios.values()),
            "composition": followed.composition,
            "centred": followed.center_keys,
            "equalized": followed.equalize,
        }
        print(f"{self.model}, {name}{options.label}: {chosen}", flush=True)
        return artifact


def main() -> int:
    options = parse_arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    data = Data(source=options.data, tokens=TEXTS, length=2048)
    names = [name for name in [*recipes(), *BASELINES, *LIBRARIES] if name in options.arms]
    for model in options.models:
        run = Run(options, model, load(model, torch.float32, data))
        path = options.output / f"{_slug(Path(model).name)}.{options.part}.json"
        results: Record = {"model": Path(model).name, "calibrations": run.calibrations}
        results["settings"] = {}
        for setting in options.settings:
            questions = write_questions(run, setting)
            report = results["settings"][setting] = read_exact(run, questions)
            others = [name for name in names if name not in LIBRARIES]
            wanted = [name for name in names if name in ARMS.get(setting, others)]
            for title, record in measure(run, wanted, questions, report):
                report["arms"][title] = record
                path.write_text(json.dumps(results) + "\n", encoding="utf-8")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--part", default="answers", help="of the name of the JSON file")
    parser.add_argument("--arms", type=lambda text: text.split(";"), default=[*DEFAULT, *LIBRARIES])
    parser.add_argument("--settings", type=lambda text: text.split(","), default=["2048", "8192"])
    parser.add_argument("--questions", type=int, default=128, help="per task, of the main arms")
    parser.add_argument("--fewer", type=int, default=64, help="per task, of the other arms")
    parser.add_argument("--data", default=str(HELD_OUT), help="text to judge on")
    parser.add_argument("--texts", type=int, default=TEXTS // 2048, help="rows for the perplexity")
    parser.add_argument("--batch", type=int, default=16, help="rows of 2,048 tokens a pass")
    parser.add_argument("--calibration", default="bundled")
    parser.add_argument("--calibration-batch", type=int, default=8)
    parser.add_argument("--calibration-seed", type=int, default=0, help="order of the documents")
    parser.add_argument("--label", default="", help="after the names of arms, such as ', prose'")
    parser.add_argument("--tokens", type=int, help="of calibration")
    parser.add_argument("--length", type=int, help="of a row of calibration text")
    parser.add_argument("--steps", type=int, help="of learning")
    parser.add_argument("--shorten", type=int, default=1, help="divide all lengths, to try it out")
    return parser.parse_args()


def write_questions(run: Run, setting: str) -> Questions:
    """The prompts and texts of a setting, the same for every arm."""
    options, (length, chunk) = run.options, SETTINGS[setting]
    length //= options.shorten
    cache = Cache(_format(run.loaded) if setting == "equal" else SGLANG, prefill_chunk=chunk)
    # No arm keeps a statement exact, and some arms keep more of the end exact than others.
    farthest = replace(cache, recent=cache.recent + GROUPED)
    tokenizer = loading.load_tokenizer(find(run.model))
    data = Data(source=options.data, tokens=TEXTS, length=length)
    text = read_corpus(data, tokenizer)
    questions = min(options.questions, options.fewer) if length > LONG else options.questions
    settings = TaskSettings(questions=questions)
    plan = plan_tasks(settings, data, text, tokenizer, [farthest])
    batch = max(1, options.batch * 2048 // length)
    texts = torch.stack(text.rows[: options.texts]).to(DEVICE)
    return Questions(setting, cache, length, plan, texts, cache.first_quantized, batch)


def _format(loaded: Loaded) -> Format:
    """The format that takes as many bits as a 2-bit cache of transformers, or almost."""
    dim, bits = loaded.geometry[0].key_dim, 2.5
    return min((SGLANG, VLLM), key=lambda each: abs(int2.bits_per_element(dim, None, each) - bits))


@torch.no_grad()
def read_exact(run: Run, questions: Questions) -> Record:
    """What the exact model answers, and which tasks it can do."""
    reader, batch = exact(run.loaded), questions.batch
    tasks: Record = {}
    for series in questions.plan.series:
        answers = [answers_of(reader.model, rows, batch) for rows in (series.prompts, series.blind)]
        prompts = series.prompts
        tasks[series.task] = {
            **_record(answers[0]),
            "can_do": ExactAnswers(series, *answers).can_do,
            "prompts": [len(prompt.questions) for prompt in prompts],
            "distances": [asked.distance for prompt in prompts for asked in prompt.questions],
        }
    format = next(name for name, each in FORMATS.items() if each == questions.cache.format)
    settings = {"length": questions.length, "format": format}
    losses = text_losses(reader, questions, len(questions.texts))
    return {**settings, "exact": {"bits": 16, "tasks": tasks, "text_losses": losses}, "arms": {}}


def measure(
    run: Run, names: list[str], questions: Questions, report: Record
) -> Iterator[tuple[str, Record]]:
    """What every arm of some names answers. A name that fails is left out, so that a library that
    does not run here does not stop the others."""
    for name in names:
        try:
            for title, reader in run.arms(name, questions):
                yield title, _measure_arm(run, title, reader, questions, report)
        except Exception as error:
            print(f"{run.model}, {name} failed: {type(error).__name__}: {error}", file=sys.stderr)


def _measure_arm(
    run: Run, title: str, reader: Reader, questions: Questions, report: Record
) -> Record:
    started = time.monotonic()
    fewer = None if title.replace(run.options.label, "") in MOST else run.options.fewer
    tasks = ask(reader, questions, report, fewer)
    # The caches of transformers are slow.
    texts = LIBRARY_TEXTS if title in LIBRARIES else len(questions.texts)
    losses = text_losses(reader, questions, texts)
    seconds = round(time.monotonic() - started, 1)
    print(f"{run.model}, {questions.setting}, {title}: {seconds} s", flush=True)
    return {"bits": reader.bits, "seconds": seconds, "tasks": tasks, "text_losses": losses}


@torch.no_grad()
def ask(reader: Reader, questions: Questions, report: Record, fewer: int | None) -> Record:
    """The answers to the first prompts of each task that the exact model can do; `fewer` questions
    a task, or all of them (None)."""
    tasks = {}
    with reader.context():
        for series in questions.plan.series:
            if not report["exact"]["tasks"][series.task]["can_do"]:
                continue
            count = len(series.prompts)
            if fewer is not None:
                count = min(count, math.ceil(fewer / TASKS[series.task]))
            answers = answers_of(reader.model, series.prompts[:count], questions.batch)
            tasks[series.task] = _record(answers)
    return tasks


@torch.no_grad()
def text_losses(reader: Reader, questions: Questions, texts: int) -> list[float]:
    """The mean loss of each of the first texts, in nats a token."""
    losses = []
    with reader.context():
        for ids in questions.texts[:texts].split(questions.batch):
            losses.append(losses_of(reader.model, ids, questions.start).double().mean(1).cpu())
    return torch.cat(losses).tolist()


def _record(answers: Any) -> Record:
    digits = map(str, answers.correct.int().tolist())
    logs = [round(value, 6) for value in answers.log_probability.tolist()]
    return {"correct": "".join(digits), "log_probabilities": logs}


def _with_options(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """The recipe with the calibration text of the options."""
    changes: Record = {"source": options.calibration, "seed": options.calibration_seed}
    changes |= {key: getattr(options, key) for key in ("tokens", "length") if getattr(options, key)}
    update: Record = {"data": recipe.data.model_copy(update=changes)}
    if recipe.search is not None and options.steps is not None:
        update["search"] = recipe.search.model_copy(update={"steps": options.steps})
    return recipe.model_copy(update=update)


def _slug(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name)


if __name__ == "__main__":
    sys.exit(main())
