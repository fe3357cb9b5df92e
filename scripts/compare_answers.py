"""Tables from the answers that `benchmark_answers` wrote, of one model or many.

    python scripts/compare_answers.py FOLDER|FILE... [--settings S,T] [--chosen "A;B"]
        [--base NAME] [--learned WORD,WORD]

For every setting, as Markdown:

* answers in % of each arm and model, on the questions that all arms were asked;
* over all models, over those with learned outliers and over copies with outliers: answers, log
  probability (nats a question) and perplexity that each arm loses beside the exact model; and the
  first two divided by what `--base` loses on the same questions;
* what `--chosen` arms answer more than every other arm on each model, with the standard error over
  prompts, and which arms are ahead of them by more than one standard error; the same for the log
  probability;
* answers by the distance from a statement to its answer.

Two arms are compared on the questions that both were asked. Learned are the models whose names have
one of the words, copies those whose names end in `-o` and a number.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from answer_recipes import BASE, CHOSEN, FEEDBACK

from rotationzoo.evaluation.buckets import Buckets
from rotationzoo.linalg.paired import paired_difference, weighted_mean

EXACT = "exact"
Report = dict[str, Any]
Key = tuple[str, int]
"""A task, and the number of a prompt of it."""


@dataclass(frozen=True)
class Reply:
    """How the questions of one prompt were answered."""

    answered: int
    log_probability: float
    """The sum over the questions."""
    questions: int

    @property
    def share(self) -> float:
        return self.answered / self.questions

    @property
    def nats(self) -> float:
        return self.log_probability / self.questions


@dataclass(frozen=True)
class Arm:
    """What one arm answered of one model in one setting."""

    replies: dict[Key, Reply]
    text_losses: list[float]
    bits: float


@dataclass(frozen=True)
class Measured:
    """All arms of one model in one setting, the exact model first."""

    model: str
    arms: dict[str, Arm]
    report: Report

    def difference(self, first: str, second: str, measure: str) -> tuple[float, float]:
        """By how much the first arm answers more than the second (`share`), or how much more
        probable the right answers are (`nats`), and the standard error over prompts."""
        pair = [self.arms[name].replies for name in (first, second)]
        keys = [key for key in pair[0] if key in pair[1]]
        values = [[getattr(replies[key], measure) for key in keys] for replies in pair]
        sizes = [pair[0][key].questions for key in keys]
        difference, error = paired_difference(values[0], values[1], sizes)
        return difference, error or 0.0

    def lost(self, name: str, measure: str, like: str | None = None) -> float:
        """What an arm loses beside the exact model, on the questions that it was asked, or on those
        that another arm was asked too."""
        keys = self.arms[like or name].replies.keys() & self.arms[name].replies.keys()
        replies = [self.arms[arm].replies for arm in (EXACT, name)]
        sizes = torch.tensor([replies[0][key].questions for key in keys], dtype=torch.float64)
        values = []
        for each in replies:
            values.append(torch.tensor([getattr(each[key], measure) for key in keys]).double())
        return weighted_mean(values[0] - values[1], sizes)[0]

    def perplexity_increase(self, name: str) -> float:
        losses, exact = self.arms[name].text_losses, self.arms[EXACT].text_losses
        extra = sum(losses) - sum(exact[: len(losses)])
        return math.expm1(extra / len(losses))


def main() -> int:
    options = parse_arguments()
    reports = merge(options.results)
    settings = options.settings or list(
        dict.fromkeys(s for report in reports.values() for s in report)
    )
    for setting in settings:
        models = [
            read(model, report[setting]) for model, report in reports.items() if setting in report
        ]
        print(f"\n## {setting}: {len(models)} models")
        show_answers(models)
        for title, chosen in groups(models, options.learned.split(",")).items():
            if chosen:
                show_lost(title, chosen, options.base)
        for name in options.chosen.split(";"):
            compared = [each for each in models if name in each.arms]
            for measure, scale in (("share", 100.0), ("nats", 1.0)):
                if compared:
                    show_beside(name, compared, measure, scale)
        show_distances(models, options.near.split(";"))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--settings", type=lambda text: text.split(","))
    chosen = (CHOSEN, CHOSEN + FEEDBACK, "feedback" + FEEDBACK)
    parser.add_argument("--chosen", default=";".join(chosen))
    parser.add_argument("--base", default=BASE)
    parser.add_argument("--near", default=";".join((EXACT, BASE, "oscar", "kivi-64", *chosen)))
    parser.add_argument("--learned", default="biased,llama,peaked")
    return parser.parse_args()


def merge(paths: Iterable[Path]) -> dict[str, dict[str, Report]]:
    """Model -> setting -> its report, with the arms of all files together."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    merged: dict[str, dict[str, Report]] = {}
    for path in files:
        content = json.loads(path.read_text(encoding="utf-8"))
        settings = merged.setdefault(content["model"], {})
        for setting, report in content["settings"].items():
            first = settings.setdefault(setting, report)
            if asked(first) != asked(report):
                raise SystemExit(f"{path}, {setting}: other questions than in the other files")
            first["arms"] |= report["arms"]
    return merged


def asked(report: Report) -> list[Any]:
    """What tells the questions of a setting from those of others."""
    tasks = report["exact"]["tasks"]
    return [report["format"], {name: task["distances"] for name, task in tasks.items()}]


def read(model: str, report: Report) -> Measured:
    """The replies of every arm to the prompts of the tasks that the exact model can do."""
    exact = report["exact"]
    able = {name: task for name, task in exact["tasks"].items() if task["can_do"]}
    arms = {}
    for name, arm in {EXACT: exact, **report["arms"]}.items():
        replies: dict[Key, Reply] = {}
        for task, sizes in able.items():
            if task in arm["tasks"]:
                replies |= _split(task, arm["tasks"][task], sizes["prompts"])
        arms[name] = Arm(replies, arm["text_losses"], arm["bits"])
    return Measured(model, arms, report)


def _split(task: str, record: Report, sizes: list[int]) -> dict[Key, Reply]:
    """The replies to the first prompts of a task, as many as were asked."""
    replies, start = {}, 0
    for number, size in enumerate(sizes):
        end = start + size
        if end > len(record["correct"]):
            break
        answered = record["correct"][start:end].count("1")
        log_probability = sum(record["log_probabilities"][start:end])
        replies[task, number] = Reply(answered, log_probability, size)
        start = end
    return replies


def groups(models: list[Measured], words: list[str]) -> dict[str, list[Measured]]:
    """Title -> the models that are counted together."""
    copies = [each for each in models if re.search(r"-o\d+$", each.model)]
    plain = [each for each in models if each not in copies]
    learned = [each for each in plain if any(word in each.model for word in words)]
    parts = {"without copies": plain, "learned outliers": learned, "copies with outliers": copies}
    return {"all models": models} | {title: part for title, part in parts.items() if part != models}


def names_of(models: list[Measured]) -> list[str]:
    """The arms that any model has, without the exact one."""
    return list(dict.fromkeys(name for each in models for name in each.arms if name != EXACT))


def show_answers(models: list[Measured]) -> None:
    print(
        f"\nAnswers in %, on the questions that all arms were asked\n\n{_row('', _names(models))}"
    )
    print(_rule(len(models)))
    for name in [EXACT, *names_of(models)]:
        cells = []
        for each in models:
            common = set.intersection(*(set(arm.replies) for arm in each.arms.values()))
            if name not in each.arms:
                cells.append("")
                continue
            replies = [each.arms[name].replies[key] for key in common]
            share = sum(r.answered for r in replies) / sum(r.questions for r in replies)
            cells.append(f"{share:.1%}".rstrip("%"))
        print(_row(name, cells))


def show_lost(title: str, models: list[Measured], base: str) -> None:
    """What each arm loses, the mean over the models that have it."""
    columns = ["models", "answers", "of base's", "nats", "of base's", "perplexity", "bits"]
    print(f"\nLost, {title} ({', '.join(_names(models))})\n\n{_row('', columns)}\n{_rule(7)}")
    for name in names_of(models):
        having = [each for each in models if name in each.arms]
        cells = [str(len(having))]
        for measure, scale in (("share", 100), ("nats", 1)):
            lost = sum(each.lost(name, measure) for each in having)
            pairs = [each for each in having if base in each.arms]
            own = sum(each.lost(name, measure, base) for each in pairs)
            others = sum(each.lost(base, measure, name) for each in pairs)
            cells.append(f"{scale * lost / len(having):.2f}")
            cells.append(f"{own / others:.2f}" if others else "")
        increase = sum(each.perplexity_increase(name) for each in having) / len(having)
        bits = sorted({round(each.arms[name].bits, 2) for each in having})
        print(_row(name, [*cells, f"{increase:+.2%}", "/".join(map(str, bits))]))


def show_beside(chosen: str, models: list[Measured], measure: str, scale: float) -> None:
    """A chosen arm minus every other arm, and the arms that are ahead of it."""
    unit = {"share": "answers, points", "nats": "log probability, nats a question"}[measure]
    columns = [*_names(models), "mean"]
    print(f"\n{chosen} minus each arm, {unit}\n\n{_row('', columns)}\n{_rule(len(columns))}")
    ahead = []
    for name in names_of(models):
        if name == chosen:
            continue
        cells, differences = [], []
        for each in models:
            if name not in each.arms:
                cells.append("")
                continue
            difference, error = each.difference(chosen, name, measure)
            differences.append((difference, error))
            cells.append(f"{scale * difference:.2f} ±{scale * error:.2f}")
            if difference < -error:
                ahead.append((difference / error if error else -math.inf, each.model, name))
        mean = sum(difference for difference, _ in differences) / len(differences)
        error = math.hypot(*(error for _, error in differences)) / len(differences)
        print(_row(name, [*cells, f"{scale * mean:.2f} ±{scale * error:.2f}"]))
    pairs = sum(len(each.arms) - 2 for each in models)
    print(f"\nAhead of {chosen} by more than one standard error: {len(ahead)} of {pairs}")
    for errors, model, name in sorted(ahead):
        print(f"* {name} on {model}: {-errors:.1f} standard errors")


def show_distances(models: list[Measured], names: list[str]) -> None:
    """Answers in % by distance, all models that have the arms together, on the questions that all
    these arms were asked."""
    names = [name for name in names if any(name in each.arms for each in models)]
    models = [each for each in models if all(name in each.arms for name in names)]
    if not models:
        return
    tally: dict[str, list[tuple[int, bool]]] = {name: [] for name in names}
    for each in models:
        records = {name: _records(each.report, name) for name in names}
        for task, exact in each.report["exact"]["tasks"].items():
            if not exact["can_do"]:
                continue
            count = min(len(tasks[task]["correct"]) for tasks in records.values())
            for name, tasks in records.items():
                right = [digit == "1" for digit in tasks[task]["correct"][:count]]
                tally[name] += zip(exact["distances"], right, strict=False)
    distances = torch.tensor([distance for distance, _ in tally[names[0]]])
    low, high = (int(end).bit_length() for end in distances.aminmax())
    ranges = Buckets.between(1 << (low - 1), 1 << high).ranges
    columns = [f"{first} to {last - 1}" for first, last in ranges]
    print(f"\nAnswers in % by distance, in tokens ({', '.join(_names(models))})\n")
    print(f"{_row('', columns)}\n{_rule(len(columns))}")
    for name, answers in tally.items():
        cells = []
        for first, last in ranges:
            right = [correct for distance, correct in answers if first <= distance < last]
            cells.append(f"{100 * sum(right) / len(right):.1f}" if right else "")
        print(_row(name, cells))


def _records(report: Report, name: str) -> Report:
    tasks: Report = (report["exact"] if name == EXACT else report["arms"][name])["tasks"]
    return tasks


def _names(models: list[Measured]) -> list[str]:
    return [each.model for each in models]


def _row(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|---" * (columns + 1) + "|"


if __name__ == "__main__":
    sys.exit(main())
