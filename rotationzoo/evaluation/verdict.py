"""Which arms of an evaluation differ clearly from an artifact, and which do not: paired differences
over texts."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import TypedDict

from scipy.special import stdtr

from rotationzoo.linalg.paired import paired_difference

# The chance of calling any difference clear where there is none, over all comparisons of a window.
LEVEL = 0.05
_LARGEST = 700.0  # nats whose exponential is still a number
# How the verdict on an artifact is worded, by the sign of the difference to the other arm.
_PHRASES = {
    -1: "clearly better than",
    1: "clearly worse than",
    0: "not clearly different from",
}


class Comparison(TypedDict):
    """An artifact's arm beside another arm. Negative differences are in favour of the artifact."""

    arm: str
    other: str
    log_perplexity_difference: float
    standard_error: float | None
    p_value: float | None
    clear: bool


class Verdict(TypedDict):
    """All comparisons of a window, and the lines that say what they show."""

    texts: int
    level: float
    comparisons: list[Comparison]
    words: list[str]


def judge(
    losses: Mapping[str, list[float]], artifacts: Sequence[str], tokens: list[int]
) -> Verdict:
    """Compare each of the `artifacts` with every other arm.

    `losses` are the mean losses of each text by arm; `tokens` is how many each text has. A
    difference is one of log perplexities on the same texts. It is clear where Student's t over
    texts gives less than `LEVEL` after Holm's correction for the number of comparisons (Holm 1979).
    A single text gives no error, and no verdict.
    """
    baselines = [name for name in losses if name not in artifacts]
    pairs = [*combinations(artifacts, 2), *product(artifacts, baselines)]
    differences = [paired_difference(losses[arm], losses[other], tokens) for arm, other in pairs]
    single = [p_value(difference, error, len(tokens)) for difference, error in differences]
    comparisons: list[Comparison] = []
    for pair, (difference, error), value in zip(pairs, differences, holm(single), strict=True):
        comparisons.append(
            {
                "arm": pair[0],
                "other": pair[1],
                "log_perplexity_difference": difference,
                "standard_error": error,
                "p_value": value,
                "clear": value is not None and value < LEVEL,
            }
        )
    return {
        "texts": len(tokens),
        "level": LEVEL,
        "comparisons": comparisons,
        "words": _words(comparisons, len(tokens)),
    }


def p_value(difference: float, error: float | None, texts: int) -> float | None:
    """Two-sided, of Student's t with `texts - 1` degrees of freedom; None without an error."""
    if error is None:
        return None
    if error == 0:  # the very same losses, or a difference that is the same on every text
        return 1.0 if difference == 0 else 0.0
    return float(2 * stdtr(texts - 1, -abs(difference) / error))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """P values corrected for their number, so that the chance of any false one stays that of a
    single test."""
    ranked = sorted((value, index) for index, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, index) in enumerate(ranked):
        # No value is corrected to less than one that ranks before it.
        largest = max(largest, min(1.0, (len(ranked) - rank) * value))
        corrected[index] = largest
    return corrected


def _words(comparisons: list[Comparison], texts: int) -> list[str]:
    """A line for every artifact, and one that says what clear means."""
    if not comparisons:
        return []
    if texts < 2:
        return [
            "A single text gives no standard errors: no arm is said to be better than another. "
            "Give more --tokens."
        ]
    artifacts = dict.fromkeys(comparison["arm"] for comparison in comparisons)
    lines = [_line(name, comparisons) for name in artifacts]
    test = (
        f"Student's t over {texts} texts, Holm's correction for {len(comparisons)} comparisons, "
        f"{LEVEL:.0%}"
    )
    lines.append(
        "In brackets: perplexity beside the other's on the same texts, ± standard error. "
        f"Clear: {test}"
    )
    return lines


def _line(name: str, comparisons: list[Comparison]) -> str:
    """`NAME: clearly better than A (-1.00% ±0.10%), B (...); not clearly different from ...`"""
    parts = []
    for sign, phrase in _PHRASES.items():
        others = [
            _with_difference(comparison)
            for comparison in comparisons
            if comparison["arm"] == name and _sign(comparison) == sign
        ]
        if others:
            parts.append(f"{phrase} {', '.join(others)}")
    return f"{name}: {'; '.join(parts)}"


def _sign(comparison: Comparison) -> int:
    """-1 where the artifact is clearly better, 1 where it is clearly worse, 0 where neither is
    clear."""
    if not comparison["clear"]:
        return 0
    return -1 if comparison["log_perplexity_difference"] < 0 else 1


def _with_difference(comparison: Comparison) -> str:
    """The other arm's name, with the ratio of perplexities and its standard error in brackets."""
    ratio = math.exp(min(comparison["log_perplexity_difference"], _LARGEST))
    error = comparison["standard_error"]
    assert error is not None, "two texts and more give an error"
    return f"{comparison['other']} ({ratio - 1:+.2%} ±{ratio * error:.2%})"
