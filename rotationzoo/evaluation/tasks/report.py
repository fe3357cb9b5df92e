"""The report on recall tasks: what the exact model and every arm answered, task by task."""

from typing import TypedDict

from rotationzoo.evaluation.tasks.answering import ExactAnswers, TaskAnswers
from rotationzoo.evaluation.tasks.scores import Records, Reply, Score, Scorer, Summary
from rotationzoo.simulation.layout import CacheLayout


# These types are the JSON of `evaluate`. Other programs rely on their keys.
class LengthScore(Score):
    """How the prompts of one length were answered."""

    length: int


class ArmTaskScore(Summary, Records):
    """How an arm answered one task."""

    by_length: list[LengthScore]


class ExactLengthScore(LengthScore):
    """How the exact model answered the prompts of one length."""

    can_do: bool
    without_statements: Score
    """How it answered where the statements were cut away."""


class ExactTaskScore(Summary, Records):
    """How the exact model answered one task, at the lengths at which it can do it. Of a task that
    it can do at no length, all lengths are reported."""

    can_do: bool
    by_length: list[ExactLengthScore]
    """All lengths."""
    prompts: list[int]
    """How many questions each prompt asks; questions are in the order of prompts."""
    distances: list[int]
    """Tokens from each question's statement to its answer."""


class ArmTasks(TypedDict):
    """What an arm answered."""

    tasks: dict[str, ArmTaskScore]
    all_tasks: Summary | None
    """All tasks together; None if the exact model can do none of them."""


class ExactTasks(TypedDict):
    """What the exact model answered."""

    tasks: dict[str, ExactTaskScore]
    all_tasks: Summary | None
    """All tasks that it can do together; None if there is none."""


def report_arm(answers: TaskAnswers, cache: CacheLayout, arm: str) -> ArmTasks:
    """What an arm answered with one cache."""
    asked = [exact.series for exact in answers.asked]
    replies = list(zip(asked, answers.arms[cache, arm], strict=True))
    tasks: dict[str, ArmTaskScore] = {}
    for task in dict.fromkeys(series.task for series in asked):
        same = [(series, reply) for series, reply in replies if series.task == task]
        scorer = Scorer.of(same)
        lengths = [_score_length(reply) for reply in same]
        tasks[task] = {**scorer.summarize(), **scorer.records(), "by_length": lengths}
    return {"tasks": tasks, "all_tasks": _summarize_all(replies)}


def report_exact(answers: TaskAnswers) -> ExactTasks:
    """What the exact model answered."""
    tasks: dict[str, ExactTaskScore] = {}
    for task in dict.fromkeys(exact.series.task for exact in answers.exact):
        tasks[task] = _report_task([exact for exact in answers.exact if exact.series.task == task])
    asked = [(exact.series, exact.answers) for exact in answers.asked]
    return {"tasks": tasks, "all_tasks": _summarize_all(asked)}


def _report_task(lengths: list[ExactAnswers]) -> ExactTaskScore:
    """What the exact model answered to the prompts of one task, of one length after another."""
    done = [exact for exact in lengths if exact.can_do]
    replies = [(exact.series, exact.answers) for exact in done or lengths]
    questions = [prompt.questions for series, _ in replies for prompt in series.prompts]
    scorer = Scorer.of(replies)
    by_length = [_score_exact_length(exact) for exact in lengths]
    return {
        **scorer.summarize(),
        **scorer.records(),
        "can_do": bool(done),
        "by_length": by_length,
        "prompts": [len(asked) for asked in questions],
        "distances": scorer.distance.tolist(),
    }


def _score_length(reply: Reply) -> LengthScore:
    return {"length": reply[0].length, **Scorer.of([reply]).score()}


def _score_exact_length(exact: ExactAnswers) -> ExactLengthScore:
    return {
        **_score_length((exact.series, exact.answers)),
        "can_do": exact.can_do,
        "without_statements": Scorer.of([(exact.series, exact.blind)]).score(),
    }


def _summarize_all(replies: list[Reply]) -> Summary | None:
    return Scorer.of(replies).summarize() if replies else None
