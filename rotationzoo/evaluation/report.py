"""The report of an evaluation for each pair of windows: every arm's answers, measures and cache
size, and which arms clearly differ."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from rotationzoo.evaluation.arms import feedback_arms
from rotationzoo.evaluation.feedback import FeedbackComparison, compare_feedback, describe_feedback
from rotationzoo.evaluation.forward import Measurements, Trial
from rotationzoo.evaluation.measures import ArmMeasures, ExactMeasures
from rotationzoo.evaluation.tasks.answering import TaskAnswers
from rotationzoo.evaluation.tasks.report import ArmTasks, ExactTasks, report_arm, report_exact
from rotationzoo.evaluation.tasks.verdict import AnswerVerdict, judge_answers
from rotationzoo.evaluation.verdict import Verdict, judge
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.size import CONTEXT, arm_bits


@dataclass(frozen=True)
class Results:
    """What the forward passes of an evaluation yielded."""

    trial: Trial
    measured: Measurements
    answers: TaskAnswers
    length: int
    """Tokens per text."""


class ExactReport(ExactTasks, ExactMeasures):
    """The exact model's answers and measures."""


class ArmReport(ArmTasks, ArmMeasures):
    """An arm's answers and measures, and the bits that its cache takes per element, exact
    tokens included."""

    bits_per_element: float
    """At `CONTEXT` tokens."""
    bits_at_length: float
    """At the length of the evaluated texts."""


class WindowVerdict(Verdict):
    """The comparisons of perplexities and of answers, all of them with the nearest codes, and what
    error feedback adds. The words begin with answers."""

    answers: AnswerVerdict | None
    """None if no recall task was asked."""
    feedback: list[FeedbackComparison]
    """One for each artifact that has the factors."""


class WindowReport(TypedDict):
    """All arms with one pair of exact windows."""

    sink: int
    recent: int
    arms: dict[str, ArmReport]
    verdict: WindowVerdict


def report_exact_model(results: Results) -> ExactReport:
    """The report on the model without a 2-bit cache."""
    return {**results.measured.exact.measure_exact(), **report_exact(results.answers)}


def report_windows(results: Results, exact: ExactReport, artifacts: int) -> list[WindowReport]:
    """One report per cache of the trial, beside that on the `exact` model.

    `artifacts` is how many of the trial's arms are artifacts. They come first, and the verdict is
    about them. The other arms are baselines.
    """
    judged = [arm.name for arm in results.trial.arms[:artifacts]]
    windows: list[WindowReport] = []
    for cache in results.trial.caches:
        arms = _report_arms(results, cache)
        verdict = judge_window(arms, judged, exact)
        windows.append(
            {"sink": cache.sink, "recent": cache.recent, "arms": arms, "verdict": verdict}
        )
    return windows


def judge_window(
    arms: Mapping[str, ArmReport], judged: Sequence[str], exact: ExactReport
) -> WindowVerdict:
    """Compare each of the `judged` arms with every other arm: answers first, then perplexity.

    Arms with error feedback are only compared with the same rotations and the nearest codes.
    """
    losses = {name: arm["text_losses"] for name, arm in arms.items()}
    answered = {name: arm["tasks"] for name, arm in arms.items()}
    prompts = prompt_sizes(exact, next(iter(answered.values())))
    feedback = compare_feedback(losses, answered, exact["text_tokens"], prompts)
    for name in feedback_arms(losses):
        del losses[name], answered[name]
    verdict = judge(losses, judged, exact["text_tokens"])
    answers = judge_answers(answered, judged, prompts) if prompts else None
    words = [*(answers["words"] if answers else []), *verdict["words"]]
    words += describe_feedback(feedback, sum(prompts))
    return {**verdict, "answers": answers, "feedback": feedback, "words": words}


def prompt_sizes(exact: ExactTasks, tasks: Iterable[str]) -> list[int]:
    """How many questions each prompt of some tasks asks."""
    return [size for task in tasks for size in exact["tasks"][task]["prompts"]]


def _report_arms(results: Results, cache: CacheLayout) -> dict[str, ArmReport]:
    trial, measured = results.trial, results.measured
    reports: dict[str, ArmReport] = {}
    for arm in trial.arms:
        measures = measured.arms[cache, arm.name].measure_arm(measured.exact)
        tasks = report_arm(results.answers, cache, arm.name)
        reports[arm.name] = {
            **tasks,
            **measures,
            "bits_per_element": arm_bits(trial.geometry, arm, cache, CONTEXT),
            "bits_at_length": arm_bits(trial.geometry, arm, cache, results.length),
        }
    return reports
