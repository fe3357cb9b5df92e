"""The arms of a report: the arms of the artifact's own evaluation, and of other artifacts whose
figures were measured in the same way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rotationzoo.artifact.measured import Measured, MeasuredArm, plain_arm
from rotationzoo.artifact.store import Artifact
from rotationzoo.model.geometry import cached_layers
from rotationzoo.report.conditions import list_caveats

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
    """One arm under the name that pictures give it. `is_own`: whether it is this artifact's, with
    the nearest codes."""

    label: str
    figures: MeasuredArm
    is_own: bool = False

    @property
    def name(self) -> str:
        """In the evaluation, and in the words of its verdict."""
        return self.figures.name


@dataclass(frozen=True)
class Arms:
    """The arms that a report shows, and sentences about what it does not show."""

    evaluation: Measured
    shown: list[ShownArm]
    notes: list[str]


def gather_arms(artifact: Artifact, others: Sequence[Artifact] = ()) -> Arms | None:
    """The arms of an artifact's evaluation, its own first, then the arms of `others` that can be
    compared with it, then the baselines. None if it has not been evaluated.

    Raises `RotationZooError` for a damaged file.
    """
    evaluation = artifact.measured
    if evaluation is None:
        return None
    notes = list_caveats(evaluation, [layer.index for layer in cached_layers(artifact.geometry)])
    label = f"this one: {artifact.recipe.name}"
    of_artifact, baselines = _split_arms(evaluation, artifact.identity, label, is_own=True)
    compared: list[ShownArm] = []
    for other in others:
        measured = other.measured
        reason = "it has not been evaluated"
        if measured is not None:
            apart = evaluation.differs_from(measured)
            reason = f"its evaluation differs from this one's in the {apart}" if apart else ""
        if measured is None or reason:
            notes.append(f"{other.folder.name} is not in the pictures: {reason}.")
        else:
            compared += _split_arms(measured, other.identity, _label(other))[0]
    shown = with_unique_labels([*of_artifact, *compared, *baselines])
    if not any(_is_published(one) for one in (artifact, *others)):
        notes.append(
            f"The published recipe {PUBLISHED} is no arm: name an artifact of that recipe, "
            "evaluated on the same text, with --compare."
        )
    return Arms(evaluation, shown, notes)


def label_arms(evaluation: Measured, identity: str, label: str) -> Arms:
    """The arms of one evaluation, the artifact with this identity under `label`, where
    there is no folder of it."""
    of_artifact, baselines = _split_arms(evaluation, identity, label, True)
    return Arms(evaluation, with_unique_labels([*of_artifact, *baselines]), [])


def _split_arms(
    evaluation: Measured, identity: str, label: str, is_own: bool = False
) -> tuple[list[ShownArm], list[ShownArm]]:
    """The arms of the evaluated artifact, under `label`, and the baselines."""
    of_artifact, baselines = [], []
    plain = plain_arm(evaluation.window.arms, identity)
    for figures in evaluation.window.arms.values():
        if figures.kind == "baseline":
            baselines.append(ShownArm(_WORDS.get(figures.name, figures.name), figures))
        elif figures is plain:
            of_artifact.append(ShownArm(label, figures, is_own))
        else:
            variant = "one rotation per layer" if figures.pooled else "error feedback"
            written = f"+ {variant}" if is_own else f"{label} + {variant}"
            of_artifact.append(ShownArm(written, figures))
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
        if arm.figures.kind != "baseline" or arm.name not in _WORDS:
            label, count = _cut(full), 1
            while label in taken:
                count += 1
                label = f"{_cut(full)} ({count})"
            taken.add(label)
        unique.append(replace(arm, label=label))
    return unique


def _cut(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
