"""The arms of a report: those of the artifact's own evaluation, by the names of its chart."""

from dataclasses import dataclass
from itertools import product

from rotationzoo.artifact.measured import Measured, MeasuredArm, arms_of, plain_arm
from rotationzoo.artifact.scores import Decision, plain_name

EXACT = "exact model"
_WORDS = {
    "identity": "no rotation",
    "hadamard": "uncalibrated, Hadamard",
    "random": "uncalibrated, random",
    "kivi": "KIVI",
}


@dataclass(frozen=True)
class Arms:
    """The arms that a report shows."""

    evaluation: Measured
    chosen: MeasuredArm | None
    """The artifact's arm that the decision is on."""
    decision: Decision | None
    """None in what versions without decisions measured."""
    shown: list[tuple[str, MeasuredArm]]
    """With their names: the artifact's first, and then the baselines."""


def label_arms(evaluation: Measured, identity: str) -> Arms:
    """The arms of the evaluation of the artifact with this identity."""
    arms = evaluation.window.arms
    ours, shown = arms_of(arms, identity), list[tuple[str, MeasuredArm]]()
    has_feedback = any(arm.rounding == "feedback" for arm in ours)
    for arm in ours:
        name = arm.name
        if arm.rounding == "feedback":
            name = plain_name(name)
        elif has_feedback and not arm.pooled:
            name = "rounded one by one"
        shown.append((name, arm))
    baselines = [arm for arm in arms.values() if arm.kind == "baseline"]
    shown += [(_WORDS.get(arm.name, arm.name), arm) for arm in baselines]
    made = product(ours, evaluation.window.verdict.decisions)
    decided = ((arm, decision) for arm, decision in made if decision.arm == arm.name)
    chosen, decision = next(decided, (plain_arm(arms, identity), None))
    return Arms(evaluation, chosen, decision, shown)
