"""Which arms of an evaluation differ clearly from an artifact, and which do not: paired differences
over texts."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

from scipy.special import stdtr

from rotationzoo.linalg.paired import paired_difference

# chance of calling any difference clear where there is none, over all comparisons of a window
LEVEL = 0.05
_LARGEST = 700.0  # nats whose exponential is still a number


def judge(
    arms: Mapping[str, dict[str, Any]], artifacts: Sequence[str], tokens: list[int]
) -> dict[str, Any]:
    """Each of the `artifacts` beside every other arm; `tokens` are those of each text.

    A difference is one of log perplexities on the same texts. It is clear where Student's t over
    texts gives less than `LEVEL` after Holm's correction for the number of comparisons (Holm 1979).
    A single text gives no error, and no verdict.
    """
    others = [name for name in arms if name not in artifacts]
    pairs = [*combinations(artifacts, 2), *product(artifacts, others)]
    found = [
        paired_difference(arms[one]["text_losses"], arms[other]["text_losses"], tokens)
        for one, other in pairs
    ]
    values = holm([p_value(difference, error, len(tokens)) for difference, error in found])
    comparisons = [
        {
            "arm": one, "other": other, "log_perplexity_difference": difference, "standard_error": error,
            "p_value": value, "clear": value is not None and value < LEVEL,
        }
        for (one, other), (difference, error), value in zip(pairs, found, values, strict=True)
    ]  # fmt: skip
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
    known = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * value))
        corrected[place] = largest
    return corrected


def _words(comparisons: list[dict[str, Any]], texts: int) -> list[str]:
    """A line for every artifact, and one that says what clear means."""
    if not comparisons:
        return []
    if texts < 2:
        return [
            "A single text gives no standard errors: no arm is said to be better than another. Give more --tokens."
        ]
    lines = []
    for name in dict.fromkeys(row["arm"] for row in comparisons):
        rows = [row for row in comparisons if row["arm"] == name]
        parts = []
        for words, wanted in (
            ("clearly better than", -1),
            ("clearly worse than", 1),
            ("not clearly different from", 0),
        ):
            chosen = [row for row in rows if _direction(row) == wanted]
            if chosen:
                parts.append(f"{words} {', '.join(map(_with_difference, chosen))}")
        lines.append(f"{name}: {'; '.join(parts)}")
    test = f"Student's t over {texts} texts, Holm's correction for {len(comparisons)} comparisons, {LEVEL:.0%}"
    return [
        *lines,
        f"In brackets: perplexity beside the other's on the same texts, ± standard error. Clear: {test}",
    ]


def _direction(row: dict[str, Any]) -> int:
    """-1 where the artifact is clearly better, 1 where it is clearly worse, 0 where neither is
    clear."""
    if not row["clear"]:
        return 0
    return -1 if row["log_perplexity_difference"] < 0 else 1


def _with_difference(row: dict[str, Any]) -> str:
    ratio = math.exp(min(row["log_perplexity_difference"], _LARGEST))
    return f"{row['other']} ({ratio - 1:+.2%} ±{ratio * row['standard_error']:.2%})"
