"""What an evaluation reports of its windows: each arm's measures with the size of its cache, and
which arms differ clearly."""

from typing import TypedDict

from rotationzoo.cache.size import bits_per_element
from rotationzoo.cache.windows import Cache
from rotationzoo.evaluation.forward import Measurements, Trial
from rotationzoo.evaluation.metrics import ArmMeasures
from rotationzoo.evaluation.verdict import Verdict, judge


class ArmReport(ArmMeasures):
    """An arm's measures, and what an element of its cache takes."""

    bits_per_element: float


class WindowReport(TypedDict):
    """All arms with the same windows of exact tokens."""

    sink: int
    recent: int
    arms: dict[str, ArmReport]
    verdict: Verdict


def report_windows(trial: Trial, measured: Measurements, artifacts: int) -> list[WindowReport]:
    """A report for each cache of the trial. The first `artifacts` of its arms are those that the
    verdict is about; the others are baselines."""
    judged = [arm.name for arm in trial.arms[:artifacts]]
    tokens = measured.exact.measure_exact()["text_tokens"]
    windows: list[WindowReport] = []
    for cache in trial.caches:
        arms = _report_arms(trial, measured, cache)
        losses = {name: arm["text_losses"] for name, arm in arms.items()}
        windows.append(
            {
                "sink": cache.sink,
                "recent": cache.recent,
                "arms": arms,
                "verdict": judge(losses, judged, tokens),
            }
        )
    return windows


def _report_arms(trial: Trial, measured: Measurements, cache: Cache) -> dict[str, ArmReport]:
    reports: dict[str, ArmReport] = {}
    for arm in trial.arms:
        measures = measured.arms[cache, arm.name].measure_arm(measured.exact)
        bits = bits_per_element(
            trial.geometry, arm.group_size, cache.format, cache.sink, cache.recent
        )
        reports[arm.name] = {**measures, "bits_per_element": bits}
    return reports
