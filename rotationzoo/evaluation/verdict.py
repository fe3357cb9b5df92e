"""The verdict of an evaluation: which arms clearly differ from an artifact, by paired differences
over the same questions and the same texts, and what error feedback adds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, product

import torch
from scipy.special import stdtr

from rotationzoo.artifact import measured, scores
from rotationzoo.linalg.paired import paired_difference

# The family-wise error rate: the chance that any of a window's comparisons is falsely called clear.
LEVEL = 0.05
Answered = Mapping[str, scores.TaskRecall]
"""The answers of one arm by task. All arms answer the same tasks in the same order, and those that
decide nothing may be asked only the first questions of each task and length."""
Asked = Mapping[str, scores.ExactTaskRecall]
"""The exact model's answers by task, with how many questions each prompt asks."""


def judge_window(
    arms: Mapping[str, measured.MeasuredArm],
    judged: Sequence[str],
    exact: measured.Exact,
    decisions: Sequence[scores.Decision] = (),
) -> measured.Verdict:
    """Compare each of the `judged` arms with every other arm: answers, and perplexity. Arms with
    error feedback are only compared with the same rotations and the nearest codes. The words are
    those of the `decisions`."""
    nearest = {name: arm for name, arm in arms.items() if arm.rounding == "nearest"}
    losses = {name: arm.text_losses for name, arm in nearest.items()}
    answered = {name: arm.tasks for name, arm in nearest.items()}
    return measured.Verdict(
        texts=len(exact.text_tokens),
        words=[line for decision in decisions for line in decision.words],
        decisions=list(decisions),
        level=LEVEL,
        comparisons=list(judge_perplexity(losses, judged, exact.text_tokens)),
        answers=judge_answers(answered, judged, exact.tasks),
        feedback=list(compare_feedback(arms, exact)),
    )


def judge_perplexity(
    losses: Mapping[str, list[float]], judged: Sequence[str], tokens: list[int]
) -> Iterator[measured.Comparison]:
    """Compare the log perplexity of each of the `judged` arms with that of every other arm, by the
    mean `losses` of the same texts and their numbers of `tokens`. The difference is clear if the p
    value of Student's t test over texts, after Holm's correction for the number of comparisons
    (Holm 1979), is below `LEVEL`. A single text yields no verdict."""
    pairs = _pair_up(losses, judged)
    differences = [paired_difference(losses[arm], losses[other], tokens) for arm, other in pairs]
    values = holm([_p_value(*difference, len(tokens)) for difference in differences])
    for (arm, other), (difference, error), value in zip(pairs, differences, values, strict=True):
        yield measured.Comparison(
            arm=arm,
            other=other,
            log_perplexity_difference=difference,
            standard_error=error,
            p_value=value,
            clear=value is not None and value < LEVEL,
        )


def judge_answers(
    arms: Mapping[str, Answered], judged: Sequence[str], exact: Asked
) -> scores.AnswerVerdict | None:
    """Compare the answers of each of the `judged` arms with every other arm's. Both tests of all
    comparisons together are corrected for their number (Holm 1979). None without questions."""
    prompts = [size for task in next(iter(arms.values())) for size in exact[task].prompts]
    if not prompts:
        return None
    pairs = _pair_up(arms, judged)
    paired = [compare_answers(arms[arm], arms[other], exact) for arm, other in pairs]
    keys = "answers_p_value", "log_probability_p_value"
    values = iter(holm([getattr(each, key) for each in paired for key in keys]))
    comparisons = []
    for (arm, other), single in zip(pairs, paired, strict=True):
        each = single.model_copy(update={key: next(values) for key in keys})
        comparisons.append(
            scores.AnswerComparison(arm=arm, other=other, outcome=_outcome_of(each), **dict(each))
        )
    return scores.AnswerVerdict(
        questions=sum(prompts),
        prompts=len(prompts),
        level=LEVEL,
        comparisons=comparisons,
    )


def compare_answers(first: Answered, second: Answered, exact: Asked) -> scores.PairedAnswers:
    """Two arms' answers to the questions that both were asked, with the p values of single tests.
    Both tests compare prompt by prompt, because the questions of one prompt share its text: answers
    by `sign_flip`, and log probabilities by Student's t, weighted by questions."""
    correct, means, sizes = _read_shared(first, second, exact)
    other_correct, other_means, _ = _read_shared(second, first, exact)
    gains = (correct.int() - other_correct.int()).split(sizes)
    difference, error = paired_difference(means, other_means, sizes)
    return scores.PairedAnswers(
        answered=int(correct.sum()),
        other_answered=int(other_correct.sum()),
        only_arm=int((correct & ~other_correct).sum()),
        only_other=int((other_correct & ~correct).sum()),
        answers_p_value=sign_flip(int(gain.sum()) for gain in gains),
        log_probability_difference=difference,
        standard_error=error,
        log_probability_p_value=_p_value(difference, error, len(sizes)),
    )


def _read_shared(
    arm: Answered, other: Answered, exact: Asked
) -> tuple[torch.Tensor, list[float], list[int]]:
    """Of the questions that both arms were asked: which the first answers right, boolean
    `[questions]`; and for each prompt the mean log probability of its answers, and how many there
    are. Whole prompts are asked, and where only some of a task are, all of its prompts are alike.
    """
    digits, logs, sizes = list[str](), list[float](), list[int]()
    for task, recall in arm.items():
        start, places = 0, list[int]()
        for mine, theirs in zip(recall.by_length, other[task].by_length, strict=True):
            places += range(start, start + min(mine.questions, theirs.questions))
            start += mine.questions
        digits += [recall.correct[place] for place in places]
        logs += [recall.log_probabilities[place] for place in places]
        prompts = exact[task].prompts
        sizes += prompts[: list(accumulate(prompts)).index(len(places)) + 1]
    parts = torch.tensor(logs, dtype=torch.float64).split(sizes)
    correct = torch.tensor([digit == "1" for digit in digits])
    return correct, [part.mean().item() for part in parts], sizes


def compare_feedback(
    arms: Mapping[str, measured.MeasuredArm], exact: measured.Exact
) -> Iterator[measured.FeedbackComparison]:
    """Compare every arm that has error feedback with the nearest codes of its artifact."""
    plain = [arm for arm in arms.values() if arm.is_plain]
    for other in plain:
        own = (arm for arm in arms.values() if arm.artifact == other.artifact)
        arm = next((arm for arm in own if arm.rounding == "feedback"), None)
        if arm is None:
            continue
        losses, answers = (arm.text_losses, other.text_losses), None
        difference, error = paired_difference(*losses, exact.text_tokens)
        if arm.tasks:
            answers = compare_answers(arm.tasks, other.tasks, exact.tasks)
        yield measured.FeedbackComparison(
            arm=arm.name,
            other=other.name,
            answers=answers,
            log_perplexity_difference=difference,
            standard_error=error,
        )


# ---- statistics


def _pair_up(arms: Iterable[str], judged: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of arms that a verdict compares: each of the `judged` with every other arm."""
    others = [name for name in arms if name not in judged]
    return [*combinations(judged, 2), *product(judged, others)]


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


def _outcome_of(paired: scores.PairedAnswers) -> scores.Outcome:
    """The finding: by the number of answers if that is clear, and else by their log probability."""
    if paired.answers_p_value < LEVEL:
        return "more" if paired.only_arm > paired.only_other else "fewer"
    value = paired.log_probability_p_value
    if value is not None and value < LEVEL:
        return "likelier" if paired.log_probability_difference > 0 else "less likely"
    return "unclear"


def read_correct(answered: Answered) -> torch.Tensor:
    """Which questions are answered right, boolean `[questions]`, task after task."""
    digits = "".join(recall.correct for recall in answered.values())
    return torch.tensor([digit == "1" for digit in digits])
