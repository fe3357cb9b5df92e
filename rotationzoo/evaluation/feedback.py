"""What error feedback adds: an artifact's arm that writes keys with it, beside the arm of the same
rotations with the nearest codes."""

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

from rotationzoo.evaluation.arms import feedback_arms, feedback_name
from rotationzoo.evaluation.tasks.verdict import Answered, PairedAnswers, compare_answers
from rotationzoo.evaluation.verdict import LARGEST
from rotationzoo.linalg.paired import paired_difference


class FeedbackComparison(TypedDict):
    """An arm with error feedback beside the same rotations with the nearest codes. P values are of
    single tests."""

    arm: str
    """The arm with error feedback."""
    other: str
    answers: PairedAnswers | None
    """None if no recall task was asked."""
    log_perplexity_difference: float
    """Negative if error feedback is better."""
    standard_error: float | None


def compare_feedback(
    losses: Mapping[str, list[float]],
    answered: Mapping[str, Answered],
    tokens: list[int],
    prompts: Sequence[int],
) -> list[FeedbackComparison]:
    """Compare every arm that has error feedback with its nearest codes.

    - `losses`: the mean losses of the texts, by arm; `tokens` counts the tokens of each text.
    - `answered`: the answers by arm; `prompts` counts the questions of each prompt.
    """
    comparisons: list[FeedbackComparison] = []
    for other in losses:
        arm = feedback_name(other)
        if arm not in feedback_arms(losses):
            continue
        answers = compare_answers(answered[arm], answered[other], prompts) if prompts else None
        difference, error = paired_difference(losses[arm], losses[other], tokens)
        comparisons.append(
            {
                "arm": arm,
                "other": other,
                "answers": answers,
                "log_perplexity_difference": difference,
                "standard_error": error,
            }
        )
    return comparisons


def describe_feedback(comparisons: Sequence[FeedbackComparison], questions: int) -> list[str]:
    """One line for each comparison, such as `a+feedback beside a: 60% of the questions answered
    beside 44% (...), perplexity -3.1% ±0.2%`."""
    return [_line(comparison, questions) for comparison in comparisons]


def _line(comparison: FeedbackComparison, questions: int) -> str:
    parts = []
    if answers := comparison["answers"]:
        share, other = (answers["answered"] / questions, answers["other_answered"] / questions)
        nats = f"{answers['log_probability_difference']:+.2f}{_error(answers['standard_error'])}"
        test = f"p {answers['answers_p_value']:.2g}"
        parts.append(
            f"{share:.0%} of the questions answered beside {other:.0%} ({test}), {nats} nats"
        )
    ratio = math.exp(min(comparison["log_perplexity_difference"], LARGEST))
    error = comparison["standard_error"]
    precision = "" if error is None else f" ±{ratio * error:.2%}"
    parts.append(f"perplexity {ratio - 1:+.2%}{precision}")
    names = f"{comparison['arm']} beside {comparison['other']}"
    return f"{names}, the same bytes: {', '.join(parts)}"


def _error(error: float | None) -> str:
    return "" if error is None else f" ±{error:.2f}"
