"""The score of answers to recall questions: how many are right, and how probable the right ones
are; of the exact model and of every arm, task by task."""

from collections.abc import Sequence
from typing import Any

import torch

from rotationzoo.artifact import scores
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.evaluation.tasks.answering import ExactAnswers, TaskAnswers
from rotationzoo.evaluation.tasks.prompts import Series
from rotationzoo.linalg.paired import weighted_mean
from rotationzoo.recall.answers import Answers, join_answers

Reply = tuple[Series, Answers]
"""The prompts of one task and length, and the answers to all of their questions."""


def score_arm(
    answers: TaskAnswers, cache: CacheLayout, arm: str
) -> tuple[dict[str, scores.TaskRecall], scores.Recall | None]:
    """The scores of an arm with one cache: of each task, and of all together."""
    asked = zip(answers.asked, answers.arms[cache, arm], strict=True)
    # Of arms that decide nothing, only the first questions.
    replies = [(exact.series.part(0, len(given.correct)), given) for exact, given in asked]
    tasks: dict[str, scores.TaskRecall] = {}
    for task in dict.fromkeys(series.task for series, _ in replies):
        same = [reply for reply in replies if reply[0].task == task]
        lengths = [scores.LengthScore(**_length_figures(reply)) for reply in same]
        tasks[task] = scores.TaskRecall(**_task_figures(same), by_length=lengths)
    return tasks, _score_all(replies) if replies else None


def score_exact(
    answers: TaskAnswers,
) -> tuple[dict[str, scores.ExactTaskRecall], scores.Recall | None]:
    """The scores of the exact model: of each task, and of all that it can do together."""
    tasks: dict[str, scores.ExactTaskRecall] = {}
    for task in dict.fromkeys(exact.series.task for exact in answers.exact):
        tasks[task] = _score_task([exact for exact in answers.exact if exact.series.task == task])
    asked = [(exact.series, exact.answers) for exact in answers.asked]
    return tasks, _score_all(asked) if asked else None


def _score_task(lengths: list[ExactAnswers]) -> scores.ExactTaskRecall:
    """The exact model's answers to the prompts of one task, of one length after another."""
    done = [exact for exact in lengths if exact.can_do]
    replies = [(exact.series, exact.answers) for exact in done or lengths]
    by_length = []
    for exact in lengths:
        figures = _length_figures((exact.series, exact.answers))
        by_length.append(scores.ExactLengthScore(**figures, can_do=exact.can_do))
    return scores.ExactTaskRecall(
        **_task_figures(replies),
        by_length=by_length,
        can_do=bool(done),
        prompts=_prompt_sizes(replies),
    )


def _score_all(replies: Sequence[Reply]) -> scores.Recall:
    """The score of all questions of several series, with its standard errors over prompts, because
    the questions of one prompt share its text."""
    given, sizes = join_answers([answers for _, answers in replies]), _prompt_sizes(replies)
    weights, errors = torch.tensor(sizes, dtype=torch.float64), {}
    figures = {"answered": given.correct.double(), "log_probability": given.log_probability}
    for name, values in figures.items():
        means = torch.stack([part.mean() for part in values.split(sizes)])
        errors[name] = weighted_mean(means, weights)[1]
    return scores.Recall(**dict(_score(given)), standard_error=errors)


def _task_figures(replies: Sequence[Reply]) -> dict[str, Any]:
    """The score of one task, with the answer to each question."""
    digits = [str(int(right)) for _, answers in replies for right in answers.correct]
    return {**dict(_score_all(replies)), "correct": "".join(digits)}


def _length_figures(reply: Reply) -> dict[str, Any]:
    """The score of the prompts of one length."""
    series, answers = reply
    return {"length": series.length, **dict(_score(answers))}


def _score(answers: Answers) -> scores.Score:
    return scores.Score(
        answered=int(answers.correct.sum()),
        questions=len(answers.correct),
        log_probability=answers.log_probability.mean().item(),
    )


def _prompt_sizes(replies: Sequence[Reply]) -> list[int]:
    """How many questions each prompt asks."""
    return [len(prompt.questions) for series, _ in replies for prompt in series.prompts]
