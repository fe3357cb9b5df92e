"""The arms of a report: those of the artifact's own evaluation, and of artifacts beside it whose
figures were measured in the same way."""

from collections.abc import Sequence
from dataclasses import dataclass

from rotationzoo.artifact.evaluation_file import Arm, Evaluation, read_evaluation
from rotationzoo.artifact.store import Artifact

_WORDS = {
    "identity": "no rotation",
    "hadamard": "Hadamard",
    "random": "random rotation",
    "kivi": "KIVI",
}
_LONGEST = 32  # characters of a label; a picture has no room for more
PUBLISHED = "oscar-v1"
"""How the names of the recipes begin that fit the published rotations."""


@dataclass(frozen=True)
class ShownArm:
    """One arm under the name that pictures give it. `is_own`: whether it is of this artifact."""

    name: str
    """In the evaluation, and in the words of its verdict."""
    label: str
    figures: Arm
    is_own: bool = False


@dataclass(frozen=True)
class Arms:
    """What a report shows of evaluations, and sentences about what it does not."""

    evaluation: Evaluation
    shown: list[ShownArm]
    notes: list[str]

    @property
    def own_arm(self) -> ShownArm:
        """The arm of this artifact, with the nearest codes."""
        return next(arm for arm in self.shown if arm.is_own)


def gather_arms(artifact: Artifact, others: Sequence[Artifact] = ()) -> Arms | None:
    """The arms of an artifact's evaluation, its own first, then those of `others` that can be
    compared with it, then the baselines. None if it has not been evaluated.

    Raises `RotationZooError` for a damaged file.
    """
    evaluation = read_evaluation(artifact)
    if evaluation is None:
        return None
    notes: list[str] = []
    own_arms, baselines = _split_arms(evaluation, f"this one: {artifact.recipe.name}", is_own=True)
    beside: list[ShownArm] = []
    for other in others:
        other_evaluation = read_evaluation(other)
        if reason := _why_apart(evaluation, other_evaluation):
            notes.append(f"{other.folder.name} is not in the pictures: {reason}.")
        elif other_evaluation is not None:
            beside += _split_arms(other_evaluation, _label(other))[0]
    shown = _with_unique_labels([*own_arms, *beside, *baselines])
    if not any(_is_published(one) for one in (artifact, *others)):
        notes.append(
            f"The published recipe {PUBLISHED} is not beside it: name an artifact of that recipe, "
            "evaluated on the same text, with --compare."
        )
    return Arms(evaluation, shown, notes)


def arms_of(evaluation: Evaluation, label: str) -> Arms:
    """The arms of one evaluation, its own under `label`, where there is no artifact's folder."""
    of_artifact, baselines = _split_arms(evaluation, label, True)
    return Arms(evaluation, _with_unique_labels([*of_artifact, *baselines]), [])


def _split_arms(
    evaluation: Evaluation, label: str, is_own: bool = False
) -> tuple[list[ShownArm], list[ShownArm]]:
    """The arms of the evaluated artifact, under `label`, and the baselines."""
    of_artifact, baselines = [], []
    name = evaluation.own_arm
    for each, figures in evaluation.window.arms.items():
        if each == name:
            of_artifact.append(ShownArm(each, label, figures, is_own))
        elif each in _WORDS:
            baselines.append(ShownArm(each, _WORDS[each], figures))
        else:  # the same rotations with error feedback
            written = "+ error feedback" if is_own else f"{label} + feedback"
            of_artifact.append(ShownArm(each, written, figures))
    return of_artifact, baselines


def _label(other: Artifact) -> str:
    name = other.recipe.name
    return f"{name} (published)" if _is_published(other) else name


def _is_published(artifact: Artifact) -> bool:
    return artifact.recipe.name.startswith(PUBLISHED)


def _why_apart(evaluation: Evaluation, other: Evaluation | None) -> str:
    """Why the figures of two evaluations may not share a picture; empty if they may."""
    if other is None:
        return "it has not been evaluated"
    conditions, others = evaluation.conditions(), other.conditions()
    differing = [words for words in conditions if conditions[words] != others[words]]
    return f"its evaluation differs from this one's in the {differing[0]}" if differing else ""


def _with_unique_labels(arms: list[ShownArm]) -> list[ShownArm]:
    """Arms whose labels are the same get their numbers."""
    seen: dict[str, int] = {}
    unique = []
    for arm in arms:
        seen[arm.label] = count = seen.get(arm.label, 0) + 1
        label = arm.label if len(arm.label) <= _LONGEST else f"{arm.label[: _LONGEST - 1]}…"
        if count > 1:
            label += f" ({count})"
        unique.append(ShownArm(arm.name, label, arm.figures, arm.is_own))
    return unique
