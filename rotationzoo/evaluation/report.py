"""The report of an evaluation for each pair of windows: every arm's measures and cache size, and
which arms clearly differ."""

from typing import TypedDict

from rotationzoo.cache.size import bits_per_element
from rotationzoo.cache.windows import Cache
from rotationzoo.evaluation.forward import Measurements, Trial
from rotationzoo.evaluation.metrics import ArmMeasures
from rotationzoo.evaluation.verdict import Verdict, judge


class ArmReport(ArmMeasures):
    """An arm's measures and the bits that its cache takes per element."""

    bits_per_element: float


class WindowReport(TypedDict):
    """All arms with one pair of exact windows."""

    sink: int
    recent: int
    arms: dict[str, ArmReport]
    verdict: Verdict


def report_windows(trial: Trial, measured: Measurements, artifacts: int) -> list[WindowReport]:
    """One report per cache of the trial.

    `artifacts` is how many of the trial's arms are artifacts. They come first, and the verdict is
    about them. The other arms are baselines.
    """
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
