"""The check that every artifact passes before it is written: do its tensors fit its manifest?"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.claim import Claim
from rotationzoo.calibration.recipe_checks import check_recipe
from rotationzoo.errors import Unsound
from rotationzoo.linalg.composition_table import GIVEN
from rotationzoo.linalg.moments import Averages
from rotationzoo.rotations import Rotations
from rotationzoo.writer import write_artifact

FETCH_AGAIN = "fetch the weights again; activations as large as theirs have no float32 statistics"
"""The hint when a calibration's own results are unsound."""


@dataclass(frozen=True)
class Verification:
    """The outcome of a check."""

    problems: list[str]
    """Empty if everything holds."""
    orthogonality_error: float | None
    """None if the rotations could not be read."""
    checked: list[str]
    """The names of the checks that were made."""
    misfits: list[str] = field(default_factory=list)
    """The problems that are about the model and not about the artifact."""

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return not self.problems

    @property
    def only_misfits(self) -> bool:
        """Whether the artifact itself is sound, and only the model is another."""
        return 0 < len(self.misfits) == len(self.problems)

    def with_misfits(self, misfits: list[str]) -> "Verification":
        """The same with more problems that are about the model."""
        return replace(self, problems=[*self.problems, *misfits], misfits=[*self.misfits, *misfits])


def write_sound_artifact(
    folder: Path,
    rotations: Rotations,
    statistics: Averages | None,
    content: dict[str, Any],
    hint: str,
) -> Artifact:
    """Write an artifact with its card, provided that its rotations and statistics would pass
    `verify`.

    - `folder`: where to write it; an existing artifact is replaced.
    - `statistics`: None if the recipe needs none.
    - `content`: the content of the manifest, without the keys that are added when it is written.
    - `hint`: what the user can do about an unsound artifact.

    Raises `Unsound` with the first problem and `hint`, and then writes nothing.
    """
    if problems := check(rotations, statistics, content).problems:
        raise Unsound(f"not written, since it would not pass verify: {problems[0]}", hint=hint)
    return write_artifact(folder, rotations, statistics, content)


def check(
    rotations: Rotations, statistics: Averages | None, content: dict[str, Any]
) -> Verification:
    """Check rotations and statistics against the content of a manifest. Raises `RotationZooError`
    for a manifest that is damaged."""
    claim, checked = Claim.from_manifest(content), ["geometry", "finiteness"]
    if claim.recipe.composition != GIVEN:
        check_recipe(claim.recipe, claim.geometry)
    # The checks below rely on the right shapes.
    if problems := claim.layout_problems(rotations, statistics):
        return Verification(problems, None, checked)
    problems = claim.content_problems(rotations, statistics)
    origin = "agreement with the statistics" if statistics else "the recipe"
    checked += ["orthogonality", "clip ratios", origin]
    if claim.recipe.feedback:
        checked.append("error feedback")
    return Verification(problems, rotations.orthogonality_error, checked)
