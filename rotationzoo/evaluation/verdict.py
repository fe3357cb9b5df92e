"""Paired tests of answers: whether one arm clearly answers more than another, by the same
questions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.special import stdtr

from rotationzoo.artifact.scores import ExactTaskRecall, TaskRecall
from rotationzoo.linalg.paired import paired_difference

LEVEL = 0.05
"""The family-wise error rate: the chance that any of several tests finds what is not there."""
Answered = Mapping[str, TaskRecall]
"""The answers of one arm by task. All arms answer the same tasks in the same order, and those that
decide nothing may be asked only the first questions of each task and length."""
Asked = Mapping[str, ExactTaskRecall]
"""The exact model's answers by task, with how many questions each prompt asks."""
Outcome = Literal["more", "fewer", "likelier", "less likely", "unclear"]
"""How an arm's answers compare with another's: it answers clearly more or fewer questions; or it
answers about as many, and finds the right answers clearly likelier or less likely; or neither is
clear."""


@dataclass(frozen=True)
class PairedAnswers:
    """An arm's answers compared with another arm's. Positive differences favor the first."""

    questions: int
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

    @property
    def outcome(self) -> Outcome:
        """The number of answers decides if it is clear, and else their log probability."""
        if self.answers_p_value < LEVEL:
            return "more" if self.only_arm > self.only_other else "fewer"
        value = self.log_probability_p_value
        if value is not None and value < LEVEL:
            return "likelier" if self.log_probability_difference > 0 else "less likely"
        return "unclear"


def compare_answers(first: Answered, second: Answered, exact: Asked) -> PairedAnswers:
    """Two arms' answers to the same questions, with the p values of single tests. Both tests
    compare prompt by prompt, because the questions of one prompt share its text: answers by
    `sign_flip`, and log probabilities by Student's t, weighted by questions."""
    sizes = [size for task in first for size in exact[task].prompts]
    correct, other_correct = read_correct(first), read_correct(second)
    gains = (correct.int() - other_correct.int()).split(sizes)
    means, other_means = (_mean_logs(arm, sizes) for arm in (first, second))
    difference, error = paired_difference(means, other_means, sizes)
    return PairedAnswers(
        questions=sum(sizes),
        answered=int(correct.sum()),
        other_answered=int(other_correct.sum()),
        only_arm=int((correct & ~other_correct).sum()),
        only_other=int((other_correct & ~correct).sum()),
        answers_p_value=sign_flip(int(gain.sum()) for gain in gains),
        log_probability_difference=difference,
        standard_error=error,
        log_probability_p_value=_p_value(difference, error, len(sizes)),
    )


def _mean_logs(arm: Answered, sizes: list[int]) -> list[float]:
    """The mean log probability of the answers of each prompt, of so many questions."""
    logs = [value for recall in arm.values() for value in recall.log_probabilities]
    parts = torch.tensor(logs, dtype=torch.float64).split(sizes)
    return [part.mean().item() for part in parts]


def _p_value(difference: float, error: float | None, texts: int) -> float | None:
    """The two-sided p value of Student's t with `texts - 1` degrees of freedom; None if there is no
    standard error."""
    if error is None:
        return None
    if error == 0:  # every text has the same difference, possibly 0
        return 1.0 if difference == 0 else 0.0
    return float(2 * stdtr(texts - 1, -abs(difference) / error))


def sign_flip(differences: Iterable[int]) -> float:
    """The two-sided p value of the sign-flip permutation test (Fisher 1935): the share of all signs
    of the differences whose sum is at least as far from 0 as theirs.

    A difference is how many more questions of one prompt an arm answers than another. With one
    question in each prompt this is McNemar's exact test. The distribution is exact: the sums of
    whole numbers are counted one prompt after another.
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
    """P values corrected for multiple comparisons (Holm 1979), in the order given; None stays
    None."""
    ranked = sorted((value, index) for index, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for left, (value, index) in zip(range(len(ranked), 0, -1), ranked, strict=True):
        # A corrected value is never less than that of a smaller p value.
        corrected[index] = largest = max(largest, min(1.0, left * value))
    return corrected


def read_correct(answered: Answered) -> torch.Tensor:
    """Which questions are answered right, boolean `[questions]`, task after task."""
    digits = "".join(recall.correct for recall in answered.values())
    return torch.tensor([digit == "1" for digit in digits])
