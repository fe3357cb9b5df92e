"""Which arms clearly answer more than others, by paired tests over the same questions."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

import torch

from rotationzoo.evaluation.tasks.scores import Records
from rotationzoo.evaluation.verdict import LEVEL, holm, p_value, pair_up, sign_flip
from rotationzoo.linalg.paired import paired_difference
from rotationzoo.words import counted

Outcome = Literal["more", "fewer", "likelier", "less likely", "unclear"]
"""What an arm does beside another: it answers clearly more or fewer questions; or it answers about
as many, and gives the right answers clearly more or less probability; or neither is clear."""

Answered = Mapping[str, Records]
"""What one arm answered: task -> records. All arms answer the same tasks in the same order."""

_PHRASES: dict[Outcome, str] = {
    "more": "answers clearly more than",
    "fewer": "answers clearly fewer than",
    "likelier": "gives right answers clearly more probability than",
    "less likely": "gives right answers clearly less probability than",
    "unclear": "no clear difference in answers from",
}


class PairedAnswers(TypedDict):
    """An arm's answers beside those of another arm. Positive differences favour the first."""

    answered: int
    other_answered: int
    only_arm: int
    """Questions that the arm answers and the other does not."""
    only_other: int
    answers_p_value: float
    """Of the sign-flip permutation test over prompts."""
    log_probability_difference: float
    """In nats an answer."""
    standard_error: float | None
    log_probability_p_value: float | None
    """Of Student's t over prompts; None for a single prompt."""


class AnswerComparison(PairedAnswers):
    """An artifact's arm beside another arm, with p values corrected for all comparisons."""

    arm: str
    other: str
    outcome: Outcome


class AnswerVerdict(TypedDict):
    """All comparisons of a window, and the lines of text that state the result."""

    questions: int
    prompts: int
    level: float
    comparisons: list[AnswerComparison]
    words: list[str]


def judge_answers(
    arms: Mapping[str, Answered], artifacts: Sequence[str], prompts: Sequence[int]
) -> AnswerVerdict:
    """Compare each of the `artifacts` with every other arm.

    `prompts` has the number of questions of each prompt, in the order of tasks and prompts. Both
    tests of all comparisons together are corrected for their number (Holm 1979).
    """
    pairs = pair_up(arms, artifacts)
    paired = [compare_answers(arms[arm], arms[other], prompts) for arm, other in pairs]
    answers = [each["answers_p_value"] for each in paired]
    logs = [each["log_probability_p_value"] for each in paired]
    corrected = holm([*answers, *logs])
    comparisons: list[AnswerComparison] = []
    for i, ((arm, other), each) in enumerate(zip(pairs, paired, strict=True)):
        value = corrected[i]
        assert value is not None, "the sign-flip test always has a p value"
        each["answers_p_value"] = value
        each["log_probability_p_value"] = corrected[len(pairs) + i]
        comparisons.append({"arm": arm, "other": other, **each, "outcome": outcome_of(each)})
    questions = sum(prompts)
    return {
        "questions": questions,
        "prompts": len(prompts),
        "level": LEVEL,
        "comparisons": comparisons,
        "words": _words(comparisons, questions, len(prompts)),
    }


def compare_answers(first: Answered, second: Answered, prompts: Sequence[int]) -> PairedAnswers:
    """Two arms' answers to the same questions, with the p values of single tests.

    Both tests compare prompt by prompt, because the questions of one prompt share its text: those
    of answers by `sign_flip`, and those of log probabilities by Student's t, where a prompt counts
    for as many questions as it asks.
    """
    correct, other_correct = _read_correct(first), _read_correct(second)
    gains = (correct.int() - other_correct.int()).split(list(prompts))
    only_arm = int((correct & ~other_correct).sum())
    only_other = int((other_correct & ~correct).sum())
    tokens = list(prompts)
    difference, error = paired_difference(
        _prompt_means(first, tokens), _prompt_means(second, tokens), tokens
    )
    return {
        "answered": int(correct.sum()),
        "other_answered": int(other_correct.sum()),
        "only_arm": only_arm,
        "only_other": only_other,
        "answers_p_value": sign_flip(int(gain.sum()) for gain in gains),
        "log_probability_difference": difference,
        "standard_error": error,
        "log_probability_p_value": p_value(difference, error, len(prompts)),
    }


def outcome_of(paired: PairedAnswers) -> Outcome:
    """What a comparison shows: by the number of answers if that is clear, and else by their log
    probability."""
    if paired["answers_p_value"] < LEVEL:
        return "more" if paired["only_arm"] > paired["only_other"] else "fewer"
    value = paired["log_probability_p_value"]
    if value is not None and value < LEVEL:
        return "likelier" if paired["log_probability_difference"] > 0 else "less likely"
    return "unclear"


def _read_correct(answered: Answered) -> torch.Tensor:
    digits = "".join(records["correct"] for records in answered.values())
    return torch.tensor([digit == "1" for digit in digits])


def _prompt_means(answered: Answered, prompts: list[int]) -> list[float]:
    """The mean log probability of each prompt's answers."""
    logs = [value for records in answered.values() for value in records["log_probabilities"]]
    parts = torch.tensor(logs, dtype=torch.float64).split(prompts)
    return [part.mean().item() for part in parts]


def _words(comparisons: list[AnswerComparison], questions: int, prompts: int) -> list[str]:
    """One line per artifact, and one that explains what clear means."""
    if not comparisons:
        return []
    artifacts = dict.fromkeys(comparison["arm"] for comparison in comparisons)
    lines = [_line(name, comparisons, questions) for name in artifacts]
    test, tests = f"the sign-flip test over {counted(prompts, 'prompt')}", len(comparisons)
    if prompts > 1:  # a single one gives no standard error of log probabilities
        test += ", or Student's t"
        tests *= 2
    lines.append(
        f"In brackets: the share of {counted(questions, 'question')} answered, beside the other's, "
        "and the difference in the log probability of right answers, in nats ± standard error. "
        f"Clear: {test}, Holm's correction for {counted(tests, 'test')}, {LEVEL:.0%}"
    )
    return lines


def _line(name: str, comparisons: list[AnswerComparison], questions: int) -> str:
    """`NAME: answers clearly more than A (61% beside 44%, p 0.003, +1.20 ±0.25); ...`"""
    parts = []
    for outcome, phrase in _PHRASES.items():
        others = [
            _with_shares(comparison, questions)
            for comparison in comparisons
            if comparison["arm"] == name and comparison["outcome"] == outcome
        ]
        if others:
            parts.append(f"{phrase} {', '.join(others)}")
    return f"{name}: {'; '.join(parts)}"


def _with_shares(comparison: AnswerComparison, questions: int) -> str:
    """The other arm's name, followed in brackets by the figures of the comparison."""
    share, other = (comparison[key] / questions for key in ("answered", "other_answered"))
    error = comparison["standard_error"]
    precision = "" if error is None else f" ±{error:.2f}"
    difference = f"{comparison['log_probability_difference']:+.2f}{precision}"
    shares = f"{share:.0%} beside {other:.0%}, p {comparison['answers_p_value']:.2g}"
    return f"{comparison['other']} ({shares}, {difference})"
