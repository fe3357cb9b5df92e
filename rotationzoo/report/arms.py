"""The arms of a report: the arms of the artifact's own evaluation, and of other artifacts whose
figures were measured in the same way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rotationzoo.artifact.measured import Measured, MeasuredArm, arms_of, plain_arm
from rotationzoo.artifact.scores import Decision
from rotationzoo.artifact.store import Artifact

EXACT = "exact model"
_WORDS = {
    "identity": "no rotation",
    "hadamard": "Hadamard",
    "random": "random rotation",
    "kivi": "KIVI",
}
"""Baselines, as the decision calls them."""


@dataclass(frozen=True)
class ShownArm:
    """One arm under the name that the terminal and the decision give it."""

    label: str
    figures: MeasuredArm


@dataclass(frozen=True)
class Arms:
    """The arms that a report shows, and the artifacts that it cannot show, with the reasons."""

    evaluation: Measured
    chosen: MeasuredArm | None
    """The artifact's arm that the decision is on."""
    shown: list[ShownArm]
    left_out: list[str]

    @property
    def decision(self) -> Decision | None:
        """The decision on the chosen arm; None in what versions without decisions measured."""
        name = self.chosen and self.chosen.name
        made = self.evaluation.window.verdict.decisions
        return next((each for each in made if each.arm == name), None)


def gather_arms(artifact: Artifact, others: Sequence[Artifact] = ()) -> Arms | None:
    """The arms of an artifact's evaluation, its own first, then the arms of `others` that can be
    compared with it, then the baselines. None if it has not been evaluated.

    Raises `RotationZooError` for a damaged file.
    """
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
    baselines = [arm for arm in arms.values() if arm.kind == "baseline"]
    of_artifact = arms_of(arms, identity)
    named = [ShownArm(arm.name, arm) for arm in (*of_artifact, *compared)]
    named += [ShownArm(_WORDS.get(arm.name, arm.name), arm) for arm in baselines]
    decided = {decision.arm for decision in evaluation.window.verdict.decisions}
    chosen = [arm for arm in of_artifact if arm.name in decided]
    one = chosen[0] if chosen else plain_arm(arms, identity)
    return Arms(evaluation, one, with_unique_labels(named), list(left_out))


def with_unique_labels(arms: list[ShownArm]) -> list[ShownArm]:
    """Arms with labels that are all different. Baselines keep theirs."""
    taken = {EXACT, *_WORDS.values()}
    unique = []
    for arm in arms:
        label, count = arm.label, 1
        if arm.figures.kind != "baseline" or arm.figures.name not in _WORDS:
            while label in taken:
                count += 1
                label = f"{arm.label} ({count})"
            taken.add(label)
        unique.append(replace(arm, label=label))
    return unique
