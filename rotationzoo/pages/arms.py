"""The arms of a report: those of the artifact's own evaluation, and of artifacts beside it whose
figures were measured in the same way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rotationzoo.artifact.evaluation_file import Arm, Evaluation, read_evaluation
from rotationzoo.artifact.store import Artifact
from rotationzoo.model.geometry import cached_layers
from rotationzoo.pages.conditions import list_caveats

EXACT = "exact model"
_WORDS = {
    "identity": "no rotation",
    "hadamard": "Hadamard",
    "random": "random rotation",
    "kivi": "KIVI",
}
_LONGEST = 32  # characters of a label; a picture has no room for more
PUBLISHED = "oscar-v1"
"""The recipe that the published rotations were fitted by."""


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
    notes = list_caveats(evaluation, [layer.index for layer in cached_layers(artifact.geometry)])
    own_arms, baselines = _split_arms(evaluation, f"this one: {artifact.recipe.name}", is_own=True)
    beside: list[ShownArm] = []
    for other in others:
        other_evaluation = read_evaluation(other)
        reason = "it has not been evaluated"
        if other_evaluation is not None:
            apart = evaluation.differs_from(other_evaluation)
            reason = f"its evaluation differs from this one's in the {apart}" if apart else ""
        if other_evaluation is None or reason:
            notes.append(f"{other.folder.name} is not in the pictures: {reason}.")
        else:
            beside += _split_arms(other_evaluation, _label(other))[0]
    shown = with_unique_labels([*own_arms, *beside, *baselines])
    if not any(_is_published(one) for one in (artifact, *others)):
        notes.append(
            f"The published recipe {PUBLISHED} is not beside it: name an artifact of that recipe, "
            "evaluated on the same text, with --compare."
        )
    return Arms(evaluation, shown, notes)


def arms_of(evaluation: Evaluation, label: str) -> Arms:
    """The arms of one evaluation, its own under `label`, where there is no artifact's folder."""
    of_artifact, baselines = _split_arms(evaluation, label, True)
    return Arms(evaluation, with_unique_labels([*of_artifact, *baselines]), [])


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
        elif each != f"{name}+feedback":  # of a later version
            baselines.append(ShownArm(each, each, figures))
        else:
            written = "+ error feedback" if is_own else f"{label} + feedback"
            of_artifact.append(ShownArm(each, written, figures))
    return of_artifact, baselines


def _label(other: Artifact) -> str:
    name = other.recipe.name
    return f"{name} (published)" if _is_published(other) else name


def _is_published(artifact: Artifact) -> bool:
    return artifact.recipe.name == PUBLISHED


def with_unique_labels(arms: list[ShownArm]) -> list[ShownArm]:
    """Arms with labels that fit and are all different: bars of one name would lie on each other.
    Baselines keep theirs."""
    taken = {EXACT, *_WORDS.values()}
    unique = []
    for arm in arms:
        label = full = arm.label
        if label != _WORDS.get(arm.name):
            label, count = _cut(full), 1
            while label in taken:
                count += 1
                label = f"{_cut(full)} ({count})"
            taken.add(label)
        unique.append(replace(arm, label=label))
    return unique


def _cut(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
