"""Artifacts of any shape with an evaluation whose figures are made up: what a report is drawn from,
without a model."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.measured import Exact, MeasuredArm
from rotationzoo.artifact.scores import (
    Decision,
    ExactLengthScore,
    ExactTaskRecall,
    LengthScore,
    TaskRecall,
)
from rotationzoo.artifact.store import EVALUATION, Artifact
from rotationzoo.evaluation import probes
from rotationzoo.evaluation.decision import Rule, decide, put_into_words, spend_level
from rotationzoo.evaluation.evaluate import evaluate as run_evaluation
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.tasks.prompts import LOOKS
from rotationzoo.geometry import Layer, geometry_json
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.writer import add_files, library_versions, write_artifact

OF_ARTIFACT = "0123456789abcdef" * 4
"""Stands in an evaluation for the identity of the artifact that it is stored in."""
BASELINES = "identity", "hadamard", "random", "kivi"


@dataclass(frozen=True)
class Made:
    """What to make up."""

    layers: Sequence[int] = (0,)
    heads: int = 2
    dim: int = 16
    model: str = "demo"
    arm: str = "made"
    fingerprint: str = "0" * 64


def make_manifest(model: str, architecture: str, geometry: list[Layer], recipe: Recipe) -> dict:
    """The content of a manifest of rotations that no calibration made."""
    names = {"id": model, "revision": None, "license": None, "architecture": architecture}
    hashes = {"config_sha256": "2" * 64, "weights_fingerprint": "3" * 64}
    return {
        "model": names | hashes,
        "geometry": geometry_json(geometry),
        "recipe": recipe.published(),
        "recipe_sha256": recipe.hash,
        "calibration": {"source": "bundled", "tokens": 2048, "rows": 4, "fingerprint": "1" * 64},
        "identity": {},
        "versions": library_versions(),
        "run": {"seconds": 1.0, "peak_memory_bytes": None},
        "metrics": {"orthogonality_error": 1e-8},
    }


ONE = Made()


def make_artifact(folder: Path, made: Made = ONE, evaluation: dict | None = None) -> Path:
    """Write an artifact to `folder`, with an evaluation if there is one."""
    geometry = [Layer(i, i, 2 * made.heads, made.heads, made.dim, made.dim) for i in made.layers]
    recipe = PRESETS["hadamard"]
    content = make_manifest(made.model, "MadeUp", geometry, recipe)
    write_artifact(folder, fit(None, recipe, geometry), None, content)
    if evaluation:
        store_evaluation(folder, evaluation)
    return folder


def store_evaluation(folder: Path, evaluation: dict) -> None:
    """Put an evaluation into an artifact, as `evaluate --save` does."""
    artifact = Artifact.open(folder)
    text = json.dumps(evaluation).replace(OF_ARTIFACT, artifact.identity)
    add_files(artifact, {EVALUATION: text.encode()}, {})


def make_conditions(tasks: list[str], length: int, questions: int, fingerprint: str) -> dict:
    """How two texts were measured, and so many questions of each task were asked."""
    asked = {"names": tasks, "lengths": [length], "questions": questions}
    return {
        "text": {"source": "bundled", "fingerprint": fingerprint, "rows": 2, "length": length},
        "tokens": 7000,
        "format": "sglang",
        "prefill_chunk": None,
        "prefill_layout": None,
        "tasks": {**asked, "first": 64, "recent": 256},
    }


def make_evaluation(made: Made = ONE) -> dict:
    """The content of `evaluation.json`: the more to the right an arm stands, the more it costs."""
    names = [made.arm, *BASELINES]
    arms = {name: make_arm(name, number) for number, name in enumerate(names, 1)}
    decision = {
        "arm": made.arm,
        "kept": 0.6875,
        "interval": [0.6, 0.8],
        "floor": 0.5,
        "action": "serve",
        "level": 0.05,
        "words": [f"Serve it: {made.arm} keeps 69%.", "By task: needles 69% of 80."],
    }
    verdict = {"texts": 2, "words": decision["words"], "decisions": [decision]}
    window = {"sink": 64, "recent": 256, "arms": arms, "verdict": verdict}
    return {
        "model": made.model,
        "revision": None,
        "weights_fingerprint": "3" * 64,
        **make_conditions(["needles"], 4096, 96, made.fingerprint),
        "first_position": 320,
        "layers": list(made.layers),
        "rope_scaling": None,
        "notes": [],
        "exact": {
            "perplexity": 3.5,
            "text_tokens": [3500, 3500],
            "text_losses": [1.25, 1.25],
            "tasks": {"needles": make_task(_make_recall(0), is_exact=True)},
            "all_tasks": _make_recall(0),
        },
        "windows": [window],
    }


def make_arm(name: str, number: int) -> dict:
    """One arm: of the artifact where it bears its name, and otherwise a baseline."""
    cost = 0.01 * number
    of_artifact = name not in BASELINES
    return {
        "name": name,
        "kind": "artifact" if of_artifact else "baseline",
        "artifact": OF_ARTIFACT if of_artifact else None,
        "perplexity": 3.5 * (1 + cost),
        "perplexity_increase": cost,
        "standard_error": {"perplexity_increase": cost / 4},
        "tasks": {"needles": make_task(_make_recall(number))},
        "all_tasks": _make_recall(number),
        "text_losses": [1.25 + cost, 1.25 + cost],
        "bits_per_element": 2.53,
        "bits_at_length": 3.5,
    }


def _make_recall(number: int) -> dict:
    """Of 80 questions an arm answers 25 fewer than the one to its left."""
    return {
        "answered": max(0, 80 - 25 * number),
        "questions": 80,
        "log_probability": -0.1 * number,
        "standard_error": {"answered": 0.01 * number},
    }


def make_task(recall: dict, is_exact: bool = False) -> dict:
    """The answers to one task with so many right ones, which are the first."""
    right, asked = recall["answered"], recall["questions"]
    score = {key: recall[key] for key in ("answered", "questions", "log_probability")}
    length: dict[str, Any] = {"length": 4096, **score}
    task = {**recall, "correct": "1" * right + "0" * (asked - right)}
    task |= {"by_length": [length]}
    if is_exact:
        length |= {"can_do": True}
        task |= {"can_do": True, "prompts": [asked]}
    return task


def evaluate(evaluation: Evaluation, progress: Progress = silent, **through: Any) -> dict[str, Any]:
    return run_evaluation(evaluation, progress, **through).report()


@contextmanager
def short_probes() -> Iterator[None]:
    """One short prompt is recorded for servers inside the block: four long ones take a CPU 15
    seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, number in (("PROMPTS", 1), ("PROMPT", 384), ("ANSWER", 4)):
            patch.setattr(probes, name, number)
        yield


def recall(correct: str) -> TaskRecall:
    """Answers to one task, without their scores: what decisions are made by."""
    lengths = [LengthScore.model_construct(length=0, questions=len(correct))]
    return TaskRecall.model_construct(correct=correct, by_length=lengths)


def arm(name: str, losses: list[float], **fields: Any) -> MeasuredArm:
    """An arm with the mean losses of its texts alone; a baseline unless told otherwise."""
    about = {"name": name, "kind": "baseline", "tasks": {}, "all_tasks": None}
    return MeasuredArm.model_construct(**about | {"text_losses": losses} | fields)


def exact(tokens: list[int], prompts: dict[str, list[int]] | None = None) -> Exact:
    """The exact model on texts of so many tokens, and how many questions each prompt asks."""
    tasks = {
        name: ExactTaskRecall.model_construct(prompts=sizes)
        for name, sizes in (prompts or {}).items()
    }
    return Exact.model_construct(text_tokens=tokens, tasks=tasks, all_tasks=None)


def summary(answered: dict[str, int], artifact: str, exact: dict[str, int]) -> dict[str, Any]:
    """The summary of an evaluation in a manifest. `answered`: arm -> how many of the 16 questions
    of each task it answers; the first arm is the artifact's, and tasks that the `exact` model
    cannot do (0 answers) are not asked."""
    asked = [task for task, count in exact.items() if count]

    def scores(counts: dict[str, int]) -> dict[str, Any]:
        tasks = {
            task: {"answered": count, "questions": 16, "log_probability": -0.25}
            for task, count in counts.items()
        }
        total = {
            "answered": sum(counts[task] for task in asked),
            "questions": 16 * len(asked),
            "log_probability": -0.25,
            "standard_error": {"answered": 0.01, "log_probability": None},
        }
        return {"tasks": tasks, "all_tasks": total if asked else None}

    figures = {"perplexity": 12.0, "perplexity_increase": 0.5, "standard_error": {}}
    arms = {}
    for number, (name, count) in enumerate(answered.items()):
        arms[name] = make_arm(name, number) | figures | scores(dict.fromkeys(asked, count))
        arms[name]["artifact"] = None if number else artifact
    return {
        **make_conditions(list(exact), 2048, 16, "0" * 64),
        "sink": 64,
        "recent": 256,
        "arms": arms,
        "verdict": {"texts": 2, "words": ["nothing is clear"]},
        "exact": {"perplexity": 8.0, **scores(exact)},
    }


SIZE = 8  # questions of a prompt


def auto(questions: int) -> Rule:
    """The rule of `--questions auto` after so many questions of each task."""
    return Rule(level=spend_level(questions, LOOKS))


def decide_on(
    arms: dict[str, str],
    rule: Rule | None = None,
    right: str = "",
    bits: dict[str, float] | None = None,
) -> Decision:
    """The decision on the first arm, where each arm has a digit for each question of one task, by
    the first look of `--questions auto` unless there is a rule."""
    (first, mine), *_ = arms.items()
    rule = rule or auto(LOOKS[0])
    correct = right or "1" * len(mine)
    prompts = [SIZE] * (len(correct) // SIZE)
    lengths = [ExactLengthScore.model_construct(length=0, questions=len(correct), can_do=True)]
    asked = {"prompts": prompts, "by_length": lengths}
    exact = {"copy": ExactTaskRecall.model_construct(correct=correct, **asked)}
    answers = {}
    for name, digits in arms.items():
        length = lengths[0].model_copy(update={"questions": len(digits)})
        answers[name] = {"copy": recall(digits).model_copy(update={"by_length": [length]})}
    made = decide(first, answers, exact, len(correct), rule)
    return put_into_words(made, answers, exact, bits)


def draw_answers(draw: random.Random, prompts: int, *shares: float) -> list[str]:
    """The answers of arms that answer such shares: prompts are harder or easier for all of them."""
    arms: list[list[str]] = [[] for _ in shares]
    for _ in range(prompts):
        ease = draw.uniform(-1, 1)
        for share, digits in zip(shares, arms, strict=True):
            chance = share + ease * min(0.15, share, 1 - share)
            digits += ["01"[draw.random() < chance] for _ in range(SIZE)]
    return ["".join(digits) for digits in arms]


def decided(kept: float, artifact: str, questions: int = 16, engine: str = "vllm") -> dict:
    """The summary of an evaluation for an engine, with a decision on its artifact."""
    evaluation = summary({"made": 14, "hadamard": 1}, artifact, {"needles": 16})
    evaluation["tasks"]["questions"] = questions
    interval = [kept - 0.03, kept + 0.02]
    decision = {"arm": "made", "kept": kept, "interval": interval, "action": "ask", "level": 0.05}
    verdict = evaluation["verdict"] | {"decisions": [decision | {"words": ["Undecided."]}]}
    return evaluation | {"engine": engine, "verdict": verdict}


def listed(number: int, **others: Any) -> dict[str, Any]:
    """What an index says of the artifact of this number."""
    files = {"rotations.safetensors": {"size": 1, "sha256": f"{number:064x}"}}
    copy = {"hub": "huggingface", "repo": "my/zoo", "path": f"folder/{number}"}
    return {"model": "a/b", "recipe": "oscar", "files": files, "copies": [copy]} | others
