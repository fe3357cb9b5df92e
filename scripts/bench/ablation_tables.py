"""What arms of `ablate_recipes` lose, and what each step gains, as Markdown tables: means over
models and settings.

    python scripts/bench/ablation_tables.py FILE.jsonl[.gz] ... [--by-model] [--base oscar-v1]

An arm's loss is beside the exact cache, in points of answers, nats of the log probability of the
answers that the exact model gives, and nats a token of plain text; shares are of what `--base`
loses in the same places.

A step is an arm beside another with everything else equal: a row of `STEPS`. A gain is in points of
answers, and in nats of the log probability of the answers that the exact model gives. Differences
are paired, and their standard errors are over prompts, whose questions share a text. A step stays
if it gains a standard error of answers on average and no model loses a clear point by it.
"""

import argparse
import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# The arms that most steps are about.
CENTERED = "oscar centered+fb"
NEAREST = "oscar centered"
DEFAULT = "r_h_pbr whitened 0.5+fb"
HADAMARD = "hadamard whitened 0.5+fb"
BUDGET = "r_h_pbr whitened 0.5, 2.5 bits+fb, budget"
PUBLISHED = "oscar-v1"
FINE = "r_h_pbr whitened 0.5+fb, fine"
STEPS = {
    "error feedback for both sides": (CENTERED, NEAREST),
    "error feedback for keys": (CENTERED, "oscar centered+values"),
    "error feedback for values": (CENTERED, "oscar centered+keys"),
    "centered keys, nearest": (NEAREST, "oscar"),
    "centered keys": (CENTERED, "oscar+fb"),
    "eigenbasis beside Hadamard, nearest": (NEAREST, "hadamard centered"),
    "eigenbasis beside Hadamard": (CENTERED, "hadamard centered+fb"),
    "eigenbasis beside random, nearest": (NEAREST, "random centered"),
    "eigenbasis beside random": (CENTERED, "random centered+fb"),
    "per head, nearest": (NEAREST, "oscar centered by layer"),
    "per head": (CENTERED, "oscar centered by layer+fb"),
    "C_S beside key energy, nearest": ("oscar by layer", PUBLISHED),
    "C_S beside key energy": ("oscar by layer+fb", "oscar-v1+fb"),
    "damping .01 beside .001": (CENTERED, "oscar centered+fb, damping 0.001"),
    "damping .01 beside .1": (CENTERED, "oscar centered+fb, damping 0.1"),
    "four ranges beside one": (CENTERED, "oscar centered+fb, cuts {0.0f, 0.0f, 0.0f, 0.0f}"),
    "clip ratios .96/.92, nearest": ("oscar", "oscar, clip 1/1"),
    "half-way whitening": (HADAMARD, "hadamard whitened 0+fb"),
    "half-way whitening of the default": (DEFAULT, CENTERED),
    "whitening .75 beside .5": ("hadamard whitened 0.75+fb", HADAMARD),
    "eigenbasis beside Hadamard, whitened": (DEFAULT, HADAMARD),
    "third bits in place of an offset": ("hadamard whitened 0.5+fb, fine", HADAMARD),
    "third bits, not whitened": ("hadamard whitened 0+fb, fine", "hadamard whitened 0+fb"),
    "third bits, whitened .75": ("hadamard whitened 0.75+fb, fine", "hadamard whitened 0.75+fb"),
    "third bits, the default rotation": (FINE, DEFAULT),
    "a scale alone (2.125 bits) beside scale and offset (2.5)": (
        "hadamard whitened 0.5+fb, one scale", HADAMARD,
    ),
    "whitened, 2.125 bits, beside the default, 2.5": (
        "hadamard whitened 0.5+fb, one scale", CENTERED,
    ),
    "a budget of 2.5 bits beside the default": (BUDGET, DEFAULT),
    "a budget of 2.5 bits beside oscar-v1": (BUDGET, PUBLISHED),
    "the default beside oscar-v1": (DEFAULT, PUBLISHED),
    "a budget of 2.5 bits beside KVarN K4V2 (3.6)": (BUDGET, "kvarn-k4v2"),
    "a budget of 2.5 bits beside turboquant_3bit_nc (3.25)": (BUDGET, "turboquant_3bit_nc"),
    "a budget of 2.5 bits beside 2.5 for all": (BUDGET, FINE),
    "a budget of 2.25 bits beside 2.5 for all": (
        "r_h_pbr whitened 0.5, 2.25 bits+fb, budget", FINE,
    ),
    "a budget of 3 bits beside 3 for all": (
        "r_h_pbr whitened 0.5, 3 bits+fb, budget", "r_h_pbr whitened 0.5+fb, 3 bits",
    ),
    "a budget by answers, not predictions": (
        "r_h_pbr whitened 0.5, 2.5 bits by answers+fb, budget", BUDGET,
    ),
    "a budget for each side, not both": (
        "r_h_pbr whitened 0.5, 2.5 bits half and half+fb, budget", BUDGET,
    ),
    "eigenbasis beside Hadamard, with budgets": (
        BUDGET, "hadamard whitened 0.5, 2.5 bits+fb, budget",
    ),
    "the real cache beside its simulation": ("RotatedCache", CENTERED),
    **{
        f"{step}, {bits}-bit codes": (f"{arm}{end}", f"{other}{end}")
        for bits, end in ((2, ""), (3, ", 3-bit codes"), (4, ", 4-bit codes"))
        for step, arm, other in (
            ("error feedback beside nearest codes",
             "oscar centered whitened+fb", "oscar centered written nearest"),
            ("eigenbasis beside Hadamard, error feedback",
             "oscar centered whitened+fb", "hadamard centered whitened+fb"),
            ("eigenbasis beside Hadamard, nearest",
             "oscar centered written nearest", "hadamard centered written nearest"),
            ("Hadamard beside no rotation, nearest",
             "hadamard centered written nearest", "identity written nearest"),
        )
    },
}  # fmt: skip
"""Step -> the arm with it and the arm without. Error feedback writes unless it says nearest."""
ABLE = 0.1  # the share of the questions that a model must answer to count


@dataclass(frozen=True)
class Gain:
    """What a step gains in one place: points of answers, and nats, with their standard errors."""

    points: float
    points_error: float
    nats: float
    nats_error: float


def read_lines(files: Iterable[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """(Model, setting) -> arm -> its line."""
    places: dict[tuple[str, str], dict[str, Any]] = {}
    for path in files:
        open_ = gzip.open if path.suffix == ".gz" else open
        with open_(path, "rt", encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                places.setdefault((line["model"], line["setting"]), {})[line["arm"]] = line
    return {place: arms for place, arms in places.items() if _share(arms.get("exact")) >= ABLE}


def _share(line: dict[str, Any] | None) -> float:
    return 0.0 if line is None else float(np.mean(np.concatenate(_by_prompt(line)[0])))


def _by_prompt(line: dict[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Whether each question is answered, and its log probability, prompt by prompt."""
    correct, logs = [], []
    for task in line["tasks"].values():
        cuts = np.cumsum(task["prompts"])[:-1]
        answered = np.array([int(digit) for digit in task["correct"]])
        correct += np.split(answered, cuts)
        logs += np.split(np.array(task["log_probabilities"]), cuts)
    return correct, logs


def measure_gain(arms: dict[str, Any], arm: str, other: str) -> Gain | None:
    """What an arm gains beside another in one place; None where either was not measured."""
    if arm not in arms or other not in arms:
        return None
    right, _ = _by_prompt(arms["exact"])
    correct, logs = _by_prompt(arms[arm])
    without, logs_without = _by_prompt(arms[other])
    answers = np.array([one.sum() - two.sum() for one, two in zip(correct, without, strict=True)])
    given = [share.astype(bool) for share in right]
    pairs = zip(logs, logs_without, given, strict=True)
    nats = np.array([(one[which] - two[which]).sum() for one, two, which in pairs])
    asked, answered = sum(map(len, right)), sum(which.sum() for which in given)
    root = np.sqrt(len(answers))
    return Gain(
        100 * answers.sum() / asked,
        100 * answers.std(ddof=1) * root / asked,
        nats.sum() / answered,
        nats.std(ddof=1) * root / answered,
    )


def print_losses(places: dict[tuple[str, str], dict[str, Any]], base: str) -> None:
    """What every arm loses beside the exact cache, the least log probability first."""
    rows = []
    for name in {arm for arms in places.values() for arm in arms} - {"exact"}:
        losses, of_base, texts = [], [], []
        for arms in places.values():
            loss, other = (measure_gain(arms, "exact", arm) for arm in (name, base))
            if loss is None or other is None:
                continue
            losses.append((loss.points, loss.nats))
            of_base.append((other.points, other.nats))
            if read := arms[name].get("text_losses"):
                texts.append(np.mean(read) - np.mean(arms["exact"]["text_losses"]))
        if losses:
            points, nats = np.mean(losses, 0)
            shares = np.sum(losses, 0) / np.sum(of_base, 0)
            text = f"{np.mean(texts):+.4f}" if texts else ""
            cells = f"{points:.1f} | {shares[0]:.2f} | {nats:.2f} | {shares[1]:.2f} | {text}"
            rows.append((nats, f"| {name} | {len(losses)} | {cells} |"))
    print("| arm | places | points | share | nats | share | text |\n|---|---|---|---|---|---|---|")
    print("\n".join(row for _, row in sorted(rows)), end="\n\n")


def average(gains: list[Gain]) -> Gain:
    """The mean over places, and its standard error as if they were independent."""
    values = np.array([list(vars(gain).values()) for gain in gains])
    means, errors = values.mean(0), np.sqrt((values**2).sum(0)) / len(gains)
    return Gain(means[0], errors[1], means[2], errors[3])


def stays(gains: dict[str, list[Gain]]) -> bool:
    """The rule, for the gains by model."""
    whole = average([gain for of_model in gains.values() for gain in of_model])
    models = map(average, gains.values())
    lost = any(each.points < -1 and each.points < -each.points_error for each in models)
    return whole.points >= whole.points_error and not lost


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--by-model", action="store_true", help="a row for each model, too")
    parser.add_argument("--base", default="oscar-v1", help="what shares are of")
    options = parser.parse_args()
    places = read_lines(options.files)
    print_losses(places, options.base)
    print("| step | places | points | nats | stays |\n|---|---|---|---|---|")
    for step, (arm, other) in STEPS.items():
        gains: dict[str, list[Gain]] = {}
        for (model, _), arms in places.items():
            if gain := measure_gain(arms, arm, other):
                gains.setdefault(model, []).append(gain)
        if not gains:
            continue
        every = [gain for of_model in gains.values() for gain in of_model]
        stay = "yes" if stays(gains) else "no"
        print(f"| {step} | {len(every)} | {_words(average(every))} | {stay} |")
        if options.by_model:
            for model, of_model in gains.items():
                print(f"| - {model} | {len(of_model)} | {_words(average(of_model))} | |")


def _words(gain: Gain) -> str:
    points = f"{gain.points:+.1f} ±{gain.points_error:.1f}"
    return f"{points} | {gain.nats:+.2f} ±{gain.nats_error:.2f}"


if __name__ == "__main__":
    main()
