"""The arms of a report: the arms of the artifact's own evaluation, and of other artifacts whose
figures were measured in the same way."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from rotationzoo.artifact.measured import Measured, MeasuredArm, Window, arms_of, plain_arm
from rotationzoo.artifact.scores import Decision, plain_name
from rotationzoo.artifact.store import Artifact

EXACT = "exact model"
_WORDS = {
    "identity": "no rotation",
    "hadamard": "uncalibrated, Hadamard",
    "random": "uncalibrated, random",
    "kivi": "KIVI",
}


@dataclass(frozen=True)
class Arms:
    """The arms that a report shows, and the artifacts that it cannot show, with the reasons."""

    evaluation: Measured
    chosen: MeasuredArm | None
    """The artifact's arm that the decision is on."""
    decision: Decision | None
    """None in what versions without decisions measured."""
    shown: dict[str, MeasuredArm]
    """By the names that the terminal and the decision give them."""
    left_out: list[str]

    @property
    def named_window(self) -> Window:
        """The first windows, with the arms of the report by the names in its tables. The verdict
        calls a baseline by its name in the evaluation."""
        named = {}
        for label, arm in self.shown.items():
            is_named = label.lower() == arm.name.lower()
            named[label if is_named else f"{label} [{arm.name}]"] = arm
        return self.evaluation.window.model_copy(update={"arms": named})


def gather_arms(artifact: Artifact, others: Sequence[Artifact] = ()) -> Arms | None:
    """The arms of an artifact's evaluation, its own first, then the arms of `others` that can be
    compared with it, then the baselines. None if it has not been evaluated. Raises
    `RotationZooError` for a damaged file."""
    evaluation = artifact.measured
    if evaluation is None:
        return None
    compared: list[MeasuredArm] = []
    left_out: list[str] = []
    for other in others:
        measured = other.measured
        if measured is None:
            left_out.append(f"{other.folder.name} (not evaluated)")
        elif apart := evaluation.differs_from(measured):
            left_out.append(f"{other.folder.name} (its evaluation differs in the {apart})")
        else:
            compared += arms_of(measured.window.arms, other.identity)
    return label_arms(evaluation, artifact.identity, compared, left_out)


def label_arms(
    evaluation: Measured,
    identity: str,
    compared: Sequence[MeasuredArm] = (),
    left_out: Sequence[str] = (),
) -> Arms:
    """The arms of the evaluation of the artifact with this identity, with those `compared`."""
    arms = evaluation.window.arms
    plain = [arm for arm in arms.values() if arm.kind == "baseline"]
    baselines = {_WORDS.get(arm.name, arm.name): arm for arm in plain}
    ours = *arms_of(arms, identity), *compared
    with_feedback = {arm.artifact for arm in ours if arm.rounding == "feedback"}
    shown: dict[str, MeasuredArm] = {}
    for arm in ours:
        name = arm.name
        if arm.rounding == "feedback":
            name = plain_name(name)
        elif arm.artifact in with_feedback and not arm.pooled:
            name = f"{name}, rounded one by one" if compared else "rounded one by one"
        label, count = name, 1
        while label in (EXACT, *baselines, *shown):
            count += 1
            label = f"{name} ({count})"
        shown[label] = arm
    made = product(arms_of(arms, identity), evaluation.window.verdict.decisions)
    decided = ((arm, decision) for arm, decision in made if decision.arm == arm.name)
    chosen, decision = next(decided, (plain_arm(arms, identity), None))
    return Arms(evaluation, chosen, decision, {**shown, **baselines}, list(left_out))
