"""Assembles what an evaluation measured, and saves it with `evaluate --save`: `evaluation.json` in
the artifact, and a summary in its manifest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rotationzoo.artifact.measured import Exact, Measured, MeasuredArm, Probe, Window
from rotationzoo.artifact.scores import Decision
from rotationzoo.artifact.store import EVALUATION, Artifact
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.size import CONTEXT, codec_bits
from rotationzoo.evaluation.arms import Arm
from rotationzoo.evaluation.decision import SIMPLEST, decide
from rotationzoo.evaluation.forward import Measurements, Trial
from rotationzoo.evaluation.tasks.answering import TaskAnswers
from rotationzoo.evaluation.tasks.scores import score_arm, score_exact
from rotationzoo.evaluation.verdict import judge_window
from rotationzoo.storage import strict_json
from rotationzoo.writer import add_files


@dataclass(frozen=True)
class Results:
    """The results of the forward passes of an evaluation. `judged` says which of the trial's arms
    decide."""

    trial: Trial
    judged: Sequence[str]
    measured: Measurements
    answers: TaskAnswers


def assemble_report(results: Results, **conditions: Any) -> Measured:
    """Everything that was measured. `conditions`: how, as the fields of `Measured` without those
    that follow from the results."""
    trial = results.trial
    tasks, all_tasks = score_exact(results.answers)
    costs = dict(results.measured.exact.measure_exact())
    exact = Exact(**costs, tasks=tasks, all_tasks=all_tasks)
    length = conditions["text"].length
    windows = []
    for cache in trial.caches:
        arms = {arm.name: _assemble_arm(results, cache, arm, length) for arm in trial.arms}
        decisions = decide_all(results.answers, cache, results.judged)
        windows.append(_judge(cache.sink, cache.recent, arms, exact, decisions))
    notes = conditions.pop("notes") + results.answers.notes
    return Measured(
        **conditions,
        tokens=results.measured.exact.tokens,
        first_position=trial.start,
        layers=trial.layers,
        notes=notes,
        tasks=results.answers.plan.describe(results.answers.questions),
        exact=exact,
        windows=windows,
    )


def _assemble_arm(results: Results, cache: CacheLayout, arm: Arm, length: int) -> MeasuredArm:
    trial, measured = results.trial, results.measured
    tasks, all_tasks = score_arm(results.answers, cache, arm.name)
    return MeasuredArm(
        **dict(arm.about),
        **dict(measured.arms[cache, arm.name].measure_arm(measured.exact)),
        tasks=tasks,
        all_tasks=all_tasks,
        bits_per_element=codec_bits(trial.geometry, arm.codec, cache, CONTEXT),
        bits_at_length=codec_bits(trial.geometry, arm.codec, cache, length),
    )


def decide_all(answers: TaskAnswers, cache: CacheLayout, judged: Sequence[str]) -> list[Decision]:
    """The decision on each of the `judged` arms with one cache."""
    exact, _ = score_exact(answers)
    names = [arm for of_cache, arm in answers.arms if of_cache == cache]
    shown = [name for name in names if name in (*judged, *SIMPLEST)]
    arms = {name: score_arm(answers, cache, name)[0] for name in shown}
    looks = len(answers.plan.settings.looks)
    return [decide(name, arms, exact, answers.questions, looks) for name in judged]


def _judge(
    sink: int,
    recent: int,
    arms: Mapping[str, MeasuredArm],
    exact: Exact,
    decisions: Sequence[Decision],
) -> Window:
    """A window with the verdict on its artifacts' plain arms. The `decisions` on arms that it has
    are kept."""
    judged = [name for name, arm in arms.items() if arm.is_plain]
    made = [decision for decision in decisions if decision.arm in arms]
    verdict = judge_window(arms, judged, exact, made)
    return Window(sink=sink, recent=recent, arms=arms, verdict=verdict)


def save_evaluation(report: Measured, artifact: Artifact, probes: list[Probe]) -> None:
    """Add `evaluation.json` to an artifact, with only its own arms, the baselines, and what a
    server answers."""
    windows = []
    for window in report.windows:
        kept = _arms_to_keep(window.arms, artifact.identity)
        # Judge again: with fewer arms there are fewer comparisons to correct for.
        decisions = window.verdict.decisions
        windows.append(_judge(window.sink, window.recent, kept, report.exact, decisions))
    if (drift := report.drift) is not None:
        of_kept = {name: arm for name, arm in drift.arms.items() if name in windows[0].arms}
        drift = drift.model_copy(update={"arms": of_kept})
    evaluation = report.model_copy(update={"windows": windows, "drift": drift, "probes": probes})
    content = strict_json.text(evaluation.model_dump())
    summary = evaluation.summary().model_dump()
    add_files(artifact, {EVALUATION: content}, {"evaluation": summary})


def _arms_to_keep(arms: Mapping[str, MeasuredArm], identity: str) -> dict[str, MeasuredArm]:
    kept: dict[tuple[object, ...], MeasuredArm] = {}
    for arm in arms.values():
        if arm.artifact in (identity, None):
            # An artifact that was given twice has each of its arms twice.
            kind = (arm.name,) if arm.artifact is None else (arm.rounding, arm.pooled)
            kept.setdefault(kind, arm)
    return {arm.name: arm for arm in kept.values()}
