"""The verdict of an evaluation: which arms clearly differ from an artifact, by paired differences
over texts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import TypedDict

import torch
from scipy.special import stdtr

from rotationzoo.linalg.paired import paired_difference
from rotationzoo.words import counted

# The family-wise error rate: the chance that any of a window's comparisons is falsely called clear.
LEVEL = 0.05
LARGEST = 700.0  # nats: beyond about 709 the exponential overflows float64
# The wording of the verdict, by the sign of the artifact's difference from the other arm.
_PHRASES = {
    -1: "clearly better than",
    1: "clearly worse than",
    0: "not clearly different from",
}


class Comparison(TypedDict):
    """An artifact's arm compared with another arm. Negative differences favour the artifact."""

    arm: str
    other: str
    log_perplexity_difference: float
    standard_error: float | None
    p_value: float | None
    clear: bool


class Verdict(TypedDict):
    """All comparisons of a window, and the lines of text that state the result."""

    texts: int
    level: float
    comparisons: list[Comparison]
    words: list[str]


def judge(
    losses: Mapping[str, list[float]], artifacts: Sequence[str], tokens: list[int]
) -> Verdict:
    """Compare each of the `artifacts` with every other arm.

    `losses` maps each arm to the mean losses of the texts; `tokens` has the number of tokens of
    each text. Each comparison takes the difference of log perplexities on the same texts. The
    difference is clear if the p value of Student's t test over texts, after Holm's correction for
    the number of comparisons (Holm 1979), is below `LEVEL`. A single text yields no standard error
    and thus no verdict.
    """
    pairs = pair_up(losses, artifacts)
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


def pair_up(arms: Iterable[str], artifacts: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of arms that a verdict compares: each of the `artifacts` with every other arm."""
    baselines = [name for name in arms if name not in artifacts]
    return [*combinations(artifacts, 2), *product(artifacts, baselines)]


def p_value(difference: float, error: float | None, texts: int) -> float | None:
    """The two-sided p value of Student's t with `texts - 1` degrees of freedom.

    None if there is no standard error.
    """
    if error is None:
        return None
    if error == 0:  # every text has the same difference, possibly 0
        return 1.0 if difference == 0 else 0.0
    return float(2 * stdtr(texts - 1, -abs(difference) / error))


def sign_flip(differences: Iterable[int]) -> float:
    """The two-sided p value of the sign-flip permutation test (Fisher 1935): the share of all signs
    of the differences whose sum is at least as far from 0 as theirs.

    A difference is how many more questions of one prompt an arm answers than another. Questions of
    a prompt share its text, so only whole prompts may be flipped. With one question in each prompt
    this is McNemar's exact test. The distribution is exact: differences are whole numbers, so that
    their sums are counted one prompt after another.
    """
    signed = [difference for difference in differences if difference]
    chances = torch.ones(1, dtype=torch.float64)  # of the sums -S, -S + 2, ..., S
    for size in map(abs, signed):
        gap = torch.zeros(size, dtype=torch.float64)
        chances = (torch.cat([chances, gap]) + torch.cat([gap, chances])) / 2
    largest = len(chances) - 1
    sums = torch.arange(-largest, largest + 1, 2)
    return min(1.0, chances[sums.abs() >= abs(sum(signed))].sum().item())


def holm(values: Sequence[float | None]) -> list[float | None]:
    """P values corrected for multiple comparisons, in the order given; None stays None.

    With the correction, the chance of any false positive is at most that of a single test.
    """
    ranked = sorted((value, index) for index, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, index) in enumerate(ranked):
        # A corrected value is never less than that of a smaller p value.
        largest = max(largest, min(1.0, (len(ranked) - rank) * value))
        corrected[index] = largest
    return corrected


def _words(comparisons: list[Comparison], texts: int) -> list[str]:
    """One line per artifact, and one that explains what clear means."""
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
        f"Student's t over {counted(texts, 'text')}, Holm's correction for "
        f"{counted(len(comparisons), 'comparison')}, {LEVEL:.0%}"
    )
    lines.append(
        "In brackets: perplexity beside the other's on the same texts, ± standard error. "
        f"Clear: {test}"
    )
    return lines


def _line(name: str, comparisons: list[Comparison]) -> str:
    """`NAME: perplexity clearly better than A (-1% ±0.1%); not clearly different from B ...`"""
    parts = []
    for sign, phrase in _PHRASES.items():
        others = [
            _with_difference(comparison)
            for comparison in comparisons
            if comparison["arm"] == name and _sign(comparison) == sign
        ]
        if others:
            parts.append(f"{phrase} {', '.join(others)}")
    return f"{name}: perplexity {'; '.join(parts)}"


def _sign(comparison: Comparison) -> int:
    """-1 if the artifact is clearly better, 1 if it is clearly worse, and 0 otherwise."""
    if not comparison["clear"]:
        return 0
    return -1 if comparison["log_perplexity_difference"] < 0 else 1


def _with_difference(comparison: Comparison) -> str:
    """The other arm's name, followed in brackets by the relative difference in perplexity and its
    standard error."""
    ratio = math.exp(min(comparison["log_perplexity_difference"], LARGEST))
    error = comparison["standard_error"]
    assert error is not None, "two texts and more give an error"
    return f"{comparison['other']} ({ratio - 1:+.2%} ±{ratio * error:.2%})"
