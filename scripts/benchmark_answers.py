"""What recipes answer through a 2-bit cache: calibrate arms on one text, and ask each model about
another.

    python scripts/benchmark_answers.py MODEL... --calibration FILE --data FILE --output FOLDER
                                        [--arms "A;B"] [--settings S,T] [--questions N]

Every arm has the same calibration text. `-clip` in a name means that the clip ratios were chosen by
the search that `best` uses. Settings: `2048`, `4096` and `8192` tokens a prompt, and `chunks` (2048
tokens, prefilled in chunks of 512 as OSCAR's server writes them).

Prints one row per arm for each model and setting: answers and their log probability, by task; what
is lost beside the exact model; the increase of perplexity; bits per element at that length. Then,
over all models, the answers lost beside those that `oscar-v1-clip` loses, and each arm's answers
beside those of `best`, paired over prompts. FOLDER gets the artifacts, and the numbers as
`MODEL.json`. What FOLDER already holds is not computed again, so that each model can have a process
of its own, and a last call shows them all.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.evaluation.job import Evaluation, evaluate
from rotationzoo.evaluation.tasks.settings import TaskSettings
from rotationzoo.linalg.paired import paired_difference
from rotationzoo.recipe import PRESETS, Data, Recipe, Search

BEST = PRESETS["best"]
CENTRED, EQUALIZED = {"center_keys": True}, {"equalize": True}


def preset(name: str, **changes: Any) -> Recipe:
    """A preset with some keys changed, calibrated on the same rows as `best`."""
    return PRESETS[name].model_copy(update={"data": BEST.data, **changes})


ARMS: dict[str, Recipe] = {
    "oscar-v1": preset("oscar-v1"),
    "oscar-v1-clip": preset("oscar-v1-clip"),
    "oscar": preset("oscar"),
    "oscar-clip": preset("oscar-clip"),
    "oscar-clip, centred": preset("oscar-clip", **CENTRED),
    "oscar-clip, equalized": preset("oscar-clip", **EQUALIZED),
    "oscar-clip, both": preset("oscar-clip", **CENTRED, **EQUALIZED),
    "hadamard-clip": preset("hadamard-clip"),
    "hadamard-clip, centred": preset("hadamard-clip", **CENTRED),
    "hadamard-clip, equalized": preset("hadamard-clip", **EQUALIZED),
    "hadamard-clip, both": preset("hadamard-clip", **CENTRED, **EQUALIZED),
    "oscar, both, .92/.92": preset("oscar", **CENTRED, **EQUALIZED, key_clip=0.92),
    "best-uncentered": preset("best-uncentered"),
    "best by predictions": preset(
        "best", search=BEST.search and BEST.search.model_copy(update={"prompts": 0})
    ),
    "best": BEST,
}
SETTINGS: dict[str, tuple[int, int | None]] = {
    "2048": (2048, None), "4096": (4096, None), "8192": (8192, None), "chunks": (2048, 512),
}  # fmt: skip
BASE, CHOSEN = "oscar-v1-clip", "best"
TEXTS = 32768  # tokens of plain text, for the perplexity

Report = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--calibration", default="bundled")
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, help="of calibration, for every arm")
    parser.add_argument("--steps", type=int, help="of learning")
    parser.add_argument("--questions", type=int, default=128, help="per task")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--arms", default=";".join(ARMS))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    options = parser.parse_args()
    arms = [name for name in ARMS if name in options.arms.split(";")]
    results: dict[str, dict[str, Report]] = {}
    for model in options.models:
        path = options.output / f"{Path(model).name}.json"
        results[model] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for setting in options.settings.split(","):
            if setting not in results[model]:
                results[model][setting] = measure(model, arms, setting, options)
                path.write_text(json.dumps(results[model]) + "\n", encoding="utf-8")
            show(f"{model}, {setting}", results[model][setting])
    if len(results) > 1:
        for setting in options.settings.split(","):
            show_together(setting, [settings[setting] for settings in results.values()])
    return 0


def measure(model: str, arms: list[str], setting: str, options: argparse.Namespace) -> Report:
    """Calibrate what has no artifact yet, and evaluate: the report, with the names of `ARMS`."""
    folders = [calibrate_arm(model, name, options) for name in arms]
    length, chunk = SETTINGS[setting]
    started = time.monotonic()
    job = Evaluation(
        model,
        folders,
        Data(source=options.data, tokens=TEXTS, length=length),
        dtype="float32",
        batch=max(1, options.batch * 2048 // length),
        prefill_chunk=chunk,
        queries=0,
        tasks=TaskSettings(questions=options.questions),
    )
    report = evaluate(job)
    print(f"{model}, {setting}: {time.monotonic() - started:.0f} s to evaluate", flush=True)
    names = [*arms, *list(report["arms"])[len(arms) :]]
    return {
        "exact": report["exact"],
        "arms": dict(zip(names, report["arms"].values(), strict=True)),
    }


def calibrate_arm(model: str, name: str, options: argparse.Namespace) -> Path:
    """The folder of an arm's artifact, calibrated now unless it exists."""
    recipe = ARMS[name]
    changes: dict[str, Any] = {"source": options.calibration}
    if options.tokens is not None:
        changes["tokens"] = options.tokens
    update: dict[str, Any] = {"data": recipe.data.model_copy(update=changes)}
    if isinstance(recipe.search, Search) and options.steps is not None:
        update["search"] = recipe.search.model_copy(update={"steps": options.steps})
    folder = options.output / Path(model).name / re.sub(r"[^\w-]+", "-", name)
    started, exists = time.monotonic(), folder.exists()
    job = Job(model, recipe.model_copy(update=update), folder, dtype="float32", batch=options.batch)
    artifact = calibrate(job)
    if not exists:
        clips = "/".join(f"{ratio:g}" for ratio in artifact.clip_ratios.values())
        followed = artifact.recipe
        print(
            f"{model}, {name}: {time.monotonic() - started:.0f} s, clip {clips}, "
            f"centred {followed.center_keys}, equalized {followed.equalize}",
            flush=True,
        )
    return artifact.folder


def show(title: str, report: Report) -> None:
    """Print one row per arm."""
    exact = report["exact"]
    asked = [task for task, score in exact["tasks"].items() if score["can_do"]]
    print(f"\n{title}\n{'':28s} answers      lost   log p  perplexity  bits  {', '.join(asked)}")
    for name, arm in {"exact": exact, **report["arms"]}.items():
        together = arm["all_tasks"]
        share = together["answered"] / together["questions"]
        error = together["standard_error"]["answered"]
        tasks = [arm["tasks"][task] for task in asked]
        by_task = " ".join(f"{task['answered'] / task['questions']:4.0%}" for task in tasks)
        print(
            f"{name:28s} {share:5.1%} ±{error:4.1%}  {lost(report, arm):5.1%} "
            f"{together['log_probability']:6.2f}  {arm.get('perplexity_increase', 0):+8.2%}  "
            f"{arm.get('bits_at_length', 16):5.2f}  {by_task}",
            flush=True,
        )


def show_together(setting: str, reports: list[Report]) -> None:
    """Print what each arm loses over all models, and how it compares with `best`."""
    base = sum(lost(report, report["arms"][BASE]) for report in reports)
    print(f"\n{len(reports)} models, {setting}: lost, of {BASE}'s; {CHOSEN} beside it, by model")
    for name in reports[0]["arms"]:
        losses = sum(lost(report, report["arms"][name]) for report in reports)
        beside = []
        for report in reports:
            difference, error = compare(report, CHOSEN, name)
            beside.append(f"{difference:+.1%} ±{error:.1%}")
        mean = losses / len(reports)
        print(f"{name:28s} {mean:5.1%} {losses / base:5.2f}  {', '.join(beside)}", flush=True)


def lost(report: Report, arm: dict[str, Any]) -> float:
    """The share of questions by which an arm answers fewer than the exact model."""
    exact, together = report["exact"]["all_tasks"], arm["all_tasks"]
    return float((exact["answered"] - together["answered"]) / exact["questions"])


def compare(report: Report, first: str, second: str) -> tuple[float, float]:
    """By how much the first arm answers more than the second, in shares of the questions of a
    prompt, and the standard error over prompts."""
    shares: dict[str, list[float]] = {first: [], second: []}
    sizes: list[int] = []
    for task, score in report["exact"]["tasks"].items():
        if not score["can_do"]:
            continue
        for name in shares:
            correct = report["arms"][name]["tasks"][task]["correct"]
            start = 0
            for size in score["prompts"]:
                shares[name].append(correct[start : start + size].count("1") / size)
                start += size
        sizes += score["prompts"]
    difference, error = paired_difference(shares[first], shares[second], sizes)
    return difference, error or 0.0


if __name__ == "__main__":
    sys.exit(main())
