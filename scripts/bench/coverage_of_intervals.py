"""How often the interval of what is kept covers the truth, and how wide it is (docs/tasks.md).

    python scripts/bench/coverage_of_intervals.py [REPORT ...] [--draws 4000]

Answers are drawn prompt by prompt from a beta-binomial. The interval of `evaluation.decision` is
compared with the one before it, which took the standard error over prompts and Student's t. Of a
REPORT (`evaluate --json`), prompts are drawn with replacement; the truth is what an arm keeps of
all. The last table has how often an arm that keeps 89.99 % is served where 90 % are to be kept.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from measuring import make_parser
from scipy.special import betaincinv, ndtri, stdtrit

from rotationzoo.evaluation.decision import FEWEST_ANSWERS, LEVEL, bound_correlations, spend_level
from rotationzoo.evaluation.tasks.prompts import LOOKS

CORRELATIONS, SHARES, PROMPTS = (0, 0.1, 0.3), (0.8, 0.9, 0.95, 0.98), (2, 4, 8, 16, 40)
DESIGNS = (8,), (8, 8), (8, 8, 4, 4, 4)  # questions of a prompt of each task
GENERATOR = np.random.default_rng(0)
Drawn = list[tuple[np.ndarray, np.ndarray]]
"""Kept and right answers of each task, `[draws, prompts]`."""


def draw(draws: int, sizes: Sequence[int], prompts: Sequence[int], share: float, c: float) -> Drawn:
    """Answers where the intraclass correlation is `c`; the exact model has 95 % of them right."""
    drawn, odds = [], 1 / c - 1 if c else 0
    for size, count in zip(sizes, prompts, strict=True):
        right = GENERATOR.binomial(size, 0.95, (draws, count))
        chance = GENERATOR.beta(share * odds, (1 - share) * odds, right.shape) if c else share
        drawn.append((GENERATOR.binomial(right, chance), right))
    return drawn


def read_arms(path: Path) -> Iterator[tuple[str, Drawn]]:
    """The recorded answers of the arms of a report that were asked everything, as one draw."""
    report = json.loads(path.read_text())
    for name, arm in report["arms"].items():
        tasks = []
        for task, given in arm["tasks"].items():
            exact = report["exact"]["tasks"][task]
            mine, right = (np.array(list(each["correct"])) == "1" for each in (given, exact))
            if len(mine) == len(right):
                starts = np.cumsum([0, *exact["prompts"][:-1]])
                sums = (np.add.reduceat(each, starts, dtype=int) for each in (mine & right, right))
                tasks.append(tuple(each[None] for each in sums))
        if tasks:
            yield name, tasks


def bound(drawn: Drawn, number: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Clopper and Pearson's interval for so many independent answers."""
    kept, right = (np.concatenate(each, 1).sum(1) for each in zip(*drawn, strict=True))
    have, lack = number * kept / right, number * (right - kept) / right
    low = np.where(kept > 0, betaincinv(np.maximum(have, 1e-9), lack + 1, level / 2), 0)
    high = np.where(kept < right, betaincinv(have + 1, np.maximum(lack, 1e-9), 1 - level / 2), 1)
    return low, high


def count_before(drawn: Drawn, level: float) -> np.ndarray:
    """As many independent answers, by the standard error over prompts."""
    kept, right = (np.concatenate(each, 1) for each in zip(*drawn, strict=True))
    answers, variance, prompts = right.sum(1), 0, (right > 0).sum(1)
    for given, all_ in drawn:
        mean, asked = given.sum(1) / np.maximum(1, all_.sum(1)), (all_ > 0).sum(1)
        spread = np.square(given - all_ * mean[:, None]).sum(1)
        variance = variance + spread * asked / np.maximum(1, asked - 1) / answers**2
    share, differs = kept.sum(1) / answers, variance > 1e-18
    number = np.minimum(answers, share * (1 - share) / np.where(differs, variance, 1))
    student = stdtrit(np.maximum(1, prompts - len(drawn)), 1 - level / 2)
    return np.where(differs, number * (ndtri(1 - level / 2) / student) ** 2, prompts)


def count_now(drawn: Drawn) -> np.ndarray:
    """As many independent answers, by a bound on the intraclass correlation."""
    kept, right = (torch.tensor(np.concatenate(each, 1)) for each in zip(*drawn, strict=True))
    tasks = [each.shape[1] for each, _ in drawn]
    parts = zip(kept.split(250), right.split(250), strict=True)
    c = torch.cat([bound_correlations(*part, tasks)[:, 0] for part in parts])
    return (right.sum(1) / (1 + c * (right.square().sum(1) / right.sum(1) - 1))).numpy()


def compare(drawn: Drawn, share: float) -> list[float]:
    """Before and now: how often the interval covers the share and lies above it, and its width."""
    figures = []
    for number in (count_before(drawn, LEVEL), count_now(drawn)):
        low, high = bound(drawn, number, LEVEL)
        covers = (low <= share) & (share <= high)
        figures.append([covers.mean(), (low > share).mean(), (high - low).mean()])
    return [100 * each for pair in zip(*figures, strict=True) for each in pair]


def count_served(drawn: Drawn, floor: float) -> list[float]:
    """How often it is served, before and now, after any of the looks, of which the last has all."""
    served, is_open = np.zeros((2, len(drawn[0][0])), bool), np.ones((2, len(drawn[0][0])), bool)
    for look in LOOKS:
        shares = [kept.shape[1] * look // LOOKS[-1] for kept, _ in drawn]
        seen = [(k[:, :n], r[:, :n]) for (k, r), n in zip(drawn, shares, strict=True)]
        enough = sum(right.sum(1) for _, right in seen) >= FEWEST_ANSWERS
        before, now = LEVEL / len(LOOKS), spend_level(look, LOOKS)
        numbers = (count_before(seen, before), before), (count_now(seen), now)
        for place, number in enumerate(numbers):
            low, high = bound(seen, *number)
            serve = (low >= floor) & enough
            served[place] |= serve & is_open[place]
            is_open[place] &= ~serve & (high >= floor)
    return list(100 * served.mean(1))


def show(title: str, cells: list[list[float]]) -> None:
    """A row: the least coverage and the most above it of all cells, and the mean width."""
    every = np.array(cells)
    figures = [*every[:, :2].min(0), *every[:, 2:4].max(0), *every[:, 4:].mean(0)]
    print(f"| {title} | " + " | ".join(f"{each:.1f}" for each in figures) + " |", flush=True)


parser = make_parser(__doc__)
parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT")
parser.add_argument("--draws", type=int, default=4000)
options = parser.parse_args()
print("| | covers: before | now | above: before | now | width: before | now |\n" + "|---" * 7 + "|")
for sizes, count in itertools.product(DESIGNS * (not options.reports), PROMPTS):
    cells = []
    for c, share in itertools.product(CORRELATIONS, SHARES):
        cells.append(compare(draw(options.draws, sizes, [count] * len(sizes), share, c), share))
    show(f"{', '.join(map(str, sizes))} questions; {count} prompts", cells)
for path, count in itertools.product(options.reports, PROMPTS):
    cells = []
    for _, tasks in read_arms(path):
        share = sum(k.mean() for k, _ in tasks) / sum(n.mean() for _, n in tasks)
        places = [GENERATOR.integers(k.shape[1], size=(options.draws, count)) for k, _ in tasks]
        drawn = [(k[0][p], n[0][p]) for (k, n), p in zip(tasks, places, strict=True)]
        cells.append(compare(drawn, share))
    show(f"{path.stem}; {count} prompts", cells)
for sizes, c in itertools.product(DESIGNS * (not options.reports), CORRELATIONS):
    drawn = draw(options.draws, sizes, [LOOKS[-1] // each for each in sizes], 0.8999, c)
    before, now = count_served(drawn, 0.9)
    print(
        f"served, {', '.join(map(str, sizes))} questions, {c}: {before:.1f}, {now:.1f}", flush=True
    )
