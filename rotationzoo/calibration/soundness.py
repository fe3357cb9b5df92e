"""The check that an artifact must pass before it is written: do its tensors fit its manifest?"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact import layout
from rotationzoo.artifact.fit import fit, target_moment, transform_problems
from rotationzoo.artifact.layout import Problem
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import EQUAL
from rotationzoo.codec.bit_allocation import budget_problems, check_room
from rotationzoo.errors import RotationZooError, Unsound
from rotationzoo.geometry import (
    Geometry,
    cached_rows,
    check_group_size,
    geometry_from_json,
    head_dims,
    shift_reason,
    shifted_layers,
)
from rotationzoo.linalg import compositions, orthogonality
from rotationzoo.linalg.composition_table import GIVEN
from rotationzoo.linalg.moments import Average, Averages
from rotationzoo.linalg.transform_coding import SEGMENT
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import from_dict
from rotationzoo.rotations import SIDES, LayerRotations, Rotations
from rotationzoo.sides import HEADS
from rotationzoo.writer import write_artifact

FETCH_AGAIN = "fetch the weights again; activations as large as theirs have no float32 statistics"
"""The hint when a calibration's own results are unsound."""
# Largest relative error of a diagonalized statistic: 6e-8 was measured, and 0.85 or more for the
# statistic of another side or layer.
DIAGONAL = 1e-4


@dataclass(frozen=True)
class Verification:
    """The outcome of a check."""

    problems: list[str]  # empty if the check passed
    orthogonality_error: float | None  # None if the rotations could not be read
    checked: list[str]  # the names of the checks that were made
    misfits: list[str] = field(default_factory=list)
    """The problems that are about the model and not about the artifact."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def only_misfits(self) -> bool:
        """Whether the artifact itself is sound, but does not fit the model."""
        return 0 < len(self.misfits) == len(self.problems)

    def with_misfits(self, misfits: list[str]) -> "Verification":
        return replace(self, problems=[*self.problems, *misfits], misfits=misfits)


@dataclass(frozen=True)
class Claim:
    """What a manifest says about rotations and statistics."""

    recipe: Recipe
    geometry: Geometry
    imported: bool = False

    def side_problems(self, rotations: Rotations, statistics: Averages) -> Iterator[Problem]:
        """Matrices that are not orthogonal, and wrong clip ratios and means."""
        allowed = orthogonality.allowed_error(self.imported)
        for layer, side, rotation in rotations.each():
            error = orthogonality.orthogonality_error(rotation.matrix)
            if not error <= allowed:  # not `error > allowed`, which is False for a NaN
                yield f"{side} rotation not orthogonal", layer
            if not (rotation.clip == self.recipe.clip(side)).all():
                yield f"{side} clip ratio not that of the recipe", layer
            average = statistics.get(layer, {}).get(side)
            if rotation.mean is None or average is None or average.mean is None:
                continue
            if not torch.equal(rotation.mean, average.mean.float()):
                yield f"{side} mean not that of the statistics", layer

    def origin_problems(
        self, rotations: Rotations, statistics: Averages | None
    ) -> Iterator[Problem]:
        """Rotations that the recipe would not make. Imported matrices are not checked."""
        if self.recipe.composition == GIVEN:
            return
        if not self.recipe.has_eigenbasis:
            yield from self._formula_problems(rotations)
        elif statistics is not None:
            yield from self._eigenbasis_problems(rotations, statistics)

    def centering_problems(self, rotations: Rotations) -> list[str]:
        """Keys stored without their mean although the attention of a layer needs it."""
        moved = shifted_layers(self.geometry)
        for _, side, rotation in rotations.each():
            if moved and side == "key" and rotation.mean is not None:
                return [f"keys are stored without their mean: {shift_reason(moved)}"]
        return []

    def _formula_problems(self, rotations: Rotations) -> Iterator[Problem]:
        """Rotations that differ from those that a recipe without an eigenbasis makes."""
        # Means and transform coding come from statistics, and are checked elsewhere.
        measured = "center_keys", "center_values", "transform"
        alone = self.recipe.model_copy(update=dict.fromkeys(measured, False) | asdict(EQUAL))
        for layer, side, rotation in fit(None, alone, self.geometry).each():
            stored = rotations[layer][side].matrix
            if not torch.allclose(rotation.matrix, stored, atol=orthogonality.ORTHOGONAL):
                yield f"{side} rotation not the one that {self.recipe.name} makes", layer

    def _eigenbasis_problems(self, rotations: Rotations, statistics: Averages) -> Iterator[Problem]:
        """Rotations whose eigenbasis does not diagonalize their own statistic."""
        for layer, sides in rotations.items():
            averages = statistics.get(layer, {})
            if self._diagonalizes(sides, averages, {side: side for side in sides.sides}):
                continue
            # Swapped sides are the most likely mistake, so they get their own message.
            swapped = {"key": "value", "value": "key"}
            if sides.sides == SIDES and self._diagonalizes(sides, averages, swapped):
                yield "key and value swapped", layer
            else:
                yield "rotations that do not come from the stored statistics", layer

    def _diagonalizes(
        self, sides: LayerRotations, averages: Mapping[str, Average], statistic_of: dict[str, str]
    ) -> bool:
        """Whether `U^T C U` is diagonal with the stored eigenvalues, within `DIAGONAL`. U is each
        side's eigenbasis, and C the second moment of the side in `statistic_of`, if stored."""
        recipe = self.recipe
        for side, other in statistic_of.items():
            if not averages.keys() >= set(recipe.target_kinds(other)):
                continue
            rotation, moment = sides[side], target_moment(averages, recipe, other)
            if rotation.dim != moment.shape[-1]:
                return False
            assert rotation.eigenvalues is not None
            eigenvalues, group = rotation.eigenvalues.double(), recipe.group(rotation.dim)
            basis = compositions.recover_basis(rotation.matrix, recipe.composition, group)
            difference = basis.mT @ moment @ basis - torch.diag_embed(eigenvalues)
            allowed = DIAGONAL * eigenvalues.norm(dim=-1)
            if not (difference.norm(dim=(-2, -1)) <= allowed).all():
                return False
        return True


def check_recipe(recipe: Recipe, geometry: Geometry) -> None:
    """Raise `RotationZooError` for a recipe that is not possible with this geometry."""
    if recipe.composition == GIVEN:
        problem = "the composition 'given' stands for imported matrices and cannot be calibrated"
        hint = "leave composition out of the recipe, or see docs/recipes.md for those that can"
        raise RotationZooError(problem, hint)
    cached = cached_rows(geometry)
    if not all(map(recipe.target_kinds, cached.sides)):
        both = f"{recipe.key_statistic} and {recipe.value_statistic}"
        hint = "give key_statistic: query and value_statistic: output, or key and value"
        problem = f"{cached.words} have no statistics {both}, as the recipe {recipe.name} asks for"
        raise RotationZooError(problem, hint)
    if cached is not HEADS and recipe.data.media:
        problem = f"images and audio are not counted for models that cache {cached.words} yet"
        hint = f"calibrate on text, without {' and '.join(recipe.data.media)}"
        raise RotationZooError(problem, hint)
    dims = head_dims(geometry)
    check_group_size(recipe.group_size, dims)
    if recipe.transform and any(dim % SEGMENT for dim in dims):
        problem = f"transform coding takes heads of a multiple of {SEGMENT} channels"
        raise RotationZooError(f"{problem}, and these have {max(dims)}", "give --recipe oscar")
    check_room(recipe.budget, geometry)
    for dim in sorted(dims):  # raises if the composition does not exist for this dimension
        if recipe.has_eigenbasis:
            compositions.compose(orthogonality.identity(dim), recipe.composition, recipe.group(dim))
        else:
            compositions.data_free(dim, recipe.composition, seed=0)


def write_sound_artifact(
    folder: Path,
    rotations: Rotations,
    statistics: Averages | None,
    content: dict[str, Any],
    hint: str,
) -> Artifact:
    """Write an artifact, replacing any in its folder, if it would pass `verify`; else raise
    `Unsound` with the first problem and `hint`. `content` is the manifest's."""
    if problems := check(rotations, statistics, content).problems:
        raise Unsound(f"not written, since it would not pass verify: {problems[0]}", hint=hint)
    return write_artifact(folder, rotations, statistics, content)


def check(
    rotations: Rotations, statistics: Averages | None, content: dict[str, Any]
) -> Verification:
    """Check tensors against a manifest's content. Raises `RotationZooError` if that is damaged."""
    recipe = from_dict(content["recipe"], "the manifest's recipe")
    imported = content.get("imported") is not None
    claim = Claim(recipe, geometry_from_json(content["geometry"]), imported)
    if recipe.composition != GIVEN:
        check_recipe(recipe, claim.geometry)
    checked = ["geometry", "finiteness"]
    expected = layout.rotation_layout(recipe, claim.geometry, claim.imported)
    problems = layout.tensor_problems(layout.rotation_tensors(rotations), expected)
    if statistics is not None:
        expected = layout.statistics_layout(recipe, claim.geometry)
        problems += layout.tensor_problems(layout.statistics_tensors(statistics), expected)
    if problems:  # the checks below rely on the right shapes
        return Verification(problems, None, checked)
    found = chain(
        claim.side_problems(rotations, statistics or {}),
        claim.origin_problems(rotations, statistics),
        transform_problems(rotations, statistics, recipe),
        budget_problems(rotations, recipe.budget),
    )
    problems = layout.sentences(found) + claim.centering_problems(rotations)
    origin = "agreement with the statistics" if statistics else "the recipe"
    checked += ["orthogonality", "clip ratios", origin]
    if recipe.transform:
        checked.append("transform coding")
    return Verification(problems, rotations.orthogonality_error, checked)
