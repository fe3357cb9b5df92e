"""How often each bound of the share that is kept misses the truth ("The bounds" in docs/tasks.md).

    python scripts/bench/coverage_of_intervals.py [REPORT ...] [--draws 4000]

Answers are drawn prompt by prompt from a beta-binomial distribution. Prompts of a REPORT
(`evaluate --json`) are drawn with replacement; the truth is the share that an arm keeps of all. The
last lines say how often an arm that keeps 89.99 % is served if it must keep 90 %.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from measuring import make_parser
from scipy.special import betaincinv

from rotationzoo.evaluation.decision import FEWEST_ANSWERS, LEVEL, bound_correlations, spend_level
from rotationzoo.evaluation.tasks.prompts import LOOKS

CORRELATIONS, SHARES, PROMPTS = (0, 0.1, 0.3), (0.8, 0.9, 0.95, 0.98), (2, 4, 8, 16, 40)
DESIGNS = (8,), (8, 8), (8, 8, 4, 4, 4)  # questions of a prompt of each task
ABLE = 0.95, 0.5  # of the questions that the exact model answers
GENERATOR = np.random.default_rng(0)
Drawn = list[tuple[np.ndarray, np.ndarray]]  # kept and right answers of tasks, [draws, prompts]


def draw(
    draws: int, sizes: Sequence[int], prompts: Sequence[int], share: float, c: float, able: float
) -> Drawn:
    """Answers with the intraclass correlation `c`, of which the exact model has `able` right."""
    drawn, odds = [], 1 / c - 1 if c else 0
    for size, count in zip(sizes, prompts, strict=True):
        right = GENERATOR.binomial(size, able, (draws, count))
        chance = GENERATOR.beta(share * odds, (1 - share) * odds, right.shape) if c else share
        drawn.append((GENERATOR.binomial(right, chance), right))
    return drawn


def read_arms(path: Path) -> Iterator[tuple[str, Drawn]]:
    """The recorded answers of the arms of a report that were asked everything, as one draw."""
    report = json.loads(path.read_text())
    arms = report.get("arms") or report["windows"][0]["arms"]
    for name, arm in arms.items():
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


def bound(drawn: Drawn, level: float) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper bound of each draw, as in `evaluation.decision`."""
    kept, right = (torch.tensor(np.concatenate(each, 1)) for each in zip(*drawn, strict=True))
    tasks = [each.shape[1] for each, _ in drawn]
    parts = zip(kept.split(250), right.split(250), strict=True)
    c = torch.cat([bound_correlations(*part, tasks)[:, 0] for part in parts])
    given, answers = kept.sum(1), right.sum(1).clamp(min=1)
    number = answers / (1 + c * (right.square().sum(1) / answers - 1))
    have, lack = ((number * each / answers).numpy() for each in (given, answers - given))
    low = np.where(have > 0, betaincinv(np.maximum(have, 1e-9), lack + 1, level), 0)
    high = np.where(lack > 0, betaincinv(have + 1, np.maximum(lack, 1e-9), 1 - level), 1)
    return low, high


def compare(drawn: Drawn, share: float) -> list[float]:
    """How often each bound misses the share."""
    low, high = bound(drawn, LEVEL)
    return [100 * (low > share).mean(), 100 * (high < share).mean()]


def count_served(drawn: Drawn, floor: float) -> float:
    """How often it is served after any look, of which the last has all questions."""
    served, refused = np.zeros((2, len(drawn[0][0])), bool)
    for look in LOOKS:
        shares = [kept.shape[1] * look // LOOKS[-1] for kept, _ in drawn]
        seen = [(k[:, :n], r[:, :n]) for (k, r), n in zip(drawn, shares, strict=True)]
        enough = sum(right.sum(1) for _, right in seen) >= FEWEST_ANSWERS
        low, high = bound(seen, spend_level(look, LOOKS))
        served |= (low >= floor) & enough & ~refused
        refused |= (high < floor) & ~served
    return 100 * served.mean()


def show(title: str, cells: list[list[float]]) -> None:
    """A row: how often each bound misses in the worst cell."""
    lower, upper = np.array(cells).max(0)
    print(f"| {title} | {lower:.1f} | {upper:.1f} |", flush=True)


parser = make_parser(__doc__)
parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT")
parser.add_argument("--draws", type=int, default=4000)
options = parser.parse_args()
print("| | lower bound misses | upper bound misses |\n|---|---|---|")
for sizes, count in itertools.product(DESIGNS * (not options.reports), PROMPTS):
    cells = []
    for c, share, able in itertools.product(CORRELATIONS, SHARES, ABLE):
        prompts = [count] * len(sizes)
        cells.append(compare(draw(options.draws, sizes, prompts, share, c, able), share))
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
    prompts = [LOOKS[-1] // each for each in sizes]
    served = count_served(draw(options.draws, sizes, prompts, 0.8999, c, 0.95), 0.9)
    print(f"{', '.join(map(str, sizes))} questions, {c}: served {served:.1f}", flush=True)
