"""The report of an evaluation for each pair of windows: every arm's measures and cache size, and
which arms clearly differ."""

from typing import TypedDict

from rotationzoo.cache.size import CONTEXT, arm_bits
from rotationzoo.cache.windows import Cache
from rotationzoo.evaluation.forward import Measurements, Trial
from rotationzoo.evaluation.metrics import ArmMeasures
from rotationzoo.evaluation.verdict import Verdict, judge


class ArmReport(ArmMeasures):
    """An arm's measures and the bits that its cache takes per element, exact tokens included."""

    bits_per_element: float
    """At `CONTEXT` tokens."""
    bits_at_length: float
    """At the length of the evaluated texts."""


class WindowReport(TypedDict):
    """All arms with one pair of exact windows."""

    sink: int
    recent: int
    arms: dict[str, ArmReport]
    verdict: Verdict


def report_windows(
    trial: Trial, measured: Measurements, artifacts: int, length: int
) -> list[WindowReport]:
    """One report per cache of the trial.

    `artifacts` is how many of the trial's arms are artifacts. They come first, and the verdict is
    about them. The other arms are baselines. `length` is that of the texts in tokens.
    """
    judged = [arm.name for arm in trial.arms[:artifacts]]
    tokens = measured.exact.measure_exact()["text_tokens"]
    windows: list[WindowReport] = []
    for cache in trial.caches:
        arms = _report_arms(trial, measured, cache, length)
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


def _report_arms(
    trial: Trial, measured: Measurements, cache: Cache, length: int
) -> dict[str, ArmReport]:
    reports: dict[str, ArmReport] = {}
    for arm in trial.arms:
        measures = measured.arms[cache, arm.name].measure_arm(measured.exact)
        reports[arm.name] = {
            **measures,
            "bits_per_element": arm_bits(trial.geometry, arm, cache, CONTEXT),
            "bits_at_length": arm_bits(trial.geometry, arm, cache, length),
        }
    return reports
