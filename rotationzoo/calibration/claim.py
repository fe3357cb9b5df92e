"""The claims of a manifest about its tensors, and where they contradict it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from rotationzoo.artifact.fit import factor_problems, fit, sum_moments
from rotationzoo.artifact.layout import rotation_layout, rotation_tensors
from rotationzoo.artifact.statistics_layout import statistics_layout, statistics_tensors
from rotationzoo.artifact.tensor_check import Problem, sentences, tensor_problems
from rotationzoo.budget import EQUAL
from rotationzoo.codec.budget import budget_problems
from rotationzoo.geometry import Geometry, geometry_from_json, shifted_layers
from rotationzoo.linalg import compositions, orthogonality
from rotationzoo.linalg.composition_table import GIVEN
from rotationzoo.linalg.moments import Average, Averages
from rotationzoo.model import centering
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import from_dict
from rotationzoo.rotations import SIDES, LayerRotations, Rotation, Rotations

# Largest relative error with which a stored rotation may diagonalise its own statistic. 6e-8 was
# measured, against 0.85 and more for the statistic of another side or layer.
DIAGONAL = 1e-4


@dataclass(frozen=True)
class Claim:
    """The statements of a manifest or a recipe about rotations and statistics."""

    recipe: Recipe
    geometry: Geometry
    imported: bool = False

    @classmethod
    def from_manifest(cls, content: Mapping[str, Any]) -> "Claim":
        """The claim of a manifest, from its content. Raises `RotationZooError` if the manifest is
        damaged."""
        recipe = from_dict(content["recipe"], "the manifest's recipe")
        geometry = geometry_from_json(content["geometry"])
        return cls(recipe, geometry, "imported" in content)

    def layout_problems(self, rotations: Rotations, statistics: Averages | None) -> list[str]:
        """Tensors that are missing, superfluous, misshapen or not finite."""
        claimed = self.recipe, self.geometry, self.imported
        layout = rotation_layout(*claimed)
        problems = tensor_problems(rotation_tensors(rotations), layout)
        if statistics is not None:
            layout = statistics_layout(*claimed)
            problems += tensor_problems(statistics_tensors(statistics), layout)
        return problems

    def content_problems(self, rotations: Rotations, statistics: Averages | None) -> list[str]:
        """One sentence for each kind of problem with tensors of the right shapes, with the layers
        that have it."""
        problems = chain(
            self.orthogonality_problems(rotations),
            self._clip_problems(rotations),
            self.origin_problems(rotations, statistics),
            factor_problems(rotations, statistics, self.recipe),
            budget_problems(rotations, self.recipe.budget, self.recipe.group_size),
            self._mean_problems(rotations, statistics or {}),
        )
        return sentences(problems) + self.centering_problems(rotations)

    def orthogonality_problems(self, rotations: Rotations) -> Iterator[Problem]:
        """Matrices that are not orthogonal."""
        allowed = orthogonality.allowed_error(self.imported)
        for layer, side, rotation in rotations.each():
            error = orthogonality.orthogonality_error(rotation.matrix)
            if not error <= allowed:  # not `error > allowed`, which is False for a NaN
                yield f"{side} rotation not orthogonal", layer

    def _clip_problems(self, rotations: Rotations) -> Iterator[Problem]:
        """Clip ratios that differ from the recipe's."""
        for layer, side, rotation in rotations.each():
            if not (rotation.clip == self.recipe.clip(side)).all():
                yield f"{side} clip ratio not that of the recipe", layer

    def origin_problems(
        self, rotations: Rotations, statistics: Averages | None
    ) -> Iterator[Problem]:
        """Rotations that the recipe would not make from the statistics, or from no data at all.

        Rotations that were imported without their formula are not checked.
        """
        recipe = self.recipe
        if recipe.composition == GIVEN:
            return
        if not recipe.has_eigenbasis:
            yield from self._formula_problems(rotations)
        elif statistics is not None:
            yield from self._eigenbasis_problems(rotations, statistics)

    def _mean_problems(self, rotations: Rotations, statistics: Averages) -> Iterator[Problem]:
        """Means that differ from the statistics'."""
        for layer, side, rotation in rotations.each():
            average = statistics.get(layer, {}).get(side)
            if rotation.mean is None or average is None or average.mean is None:
                continue
            if not torch.equal(rotation.mean, average.mean.float()):
                yield f"{side} mean not that of the statistics", layer

    def centering_problems(self, rotations: Rotations) -> list[str]:
        """Keys stored without their mean, although a layer's attention is known not to ignore
        it."""
        moved = shifted_layers(self.geometry)
        keys = [rotation for _, side, rotation in rotations.each() if side == "key"]
        centered = any(rotation.mean is not None for rotation in keys)
        if centered and moved:
            return [f"keys are stored without their mean: {centering.reason(moved)}"]
        return []

    def _formula_problems(self, rotations: Rotations) -> Iterator[Problem]:
        """Rotations that differ from those that a recipe without an eigenbasis makes, which are
        recomputed."""
        # Leave out what comes from statistics, which is checked elsewhere.
        measured = "center_keys", "center_values", "feedback", "whiten"
        formula = dict.fromkeys(measured, False) | asdict(EQUAL)
        alone = self.recipe.model_copy(update=formula)
        for layer, side, rotation in fit(None, alone, self.geometry).each():
            stored = rotations[layer][side].matrix
            if not torch.allclose(rotation.matrix, stored, atol=orthogonality.ORTHOGONAL):
                yield f"{side} rotation not the one that {self.recipe.name} makes", layer

    def _eigenbasis_problems(self, rotations: Rotations, statistics: Averages) -> Iterator[Problem]:
        """Rotations whose eigenbasis does not diagonalise the statistic that they were made
        from."""
        for layer, sides in rotations.items():
            averages = statistics.get(layer, {})
            if self._diagonalise(sides, averages, {side: side for side in sides.sides}):
                continue
            # Swapped sides are the likeliest mistake, so they get a message of their own.
            swapped = {"key": "value", "value": "key"}
            if sides.sides == SIDES and self._diagonalise(sides, averages, swapped):
                yield "key and value swapped", layer
            else:
                yield "rotations that do not come from the stored statistics", layer

    def _diagonalise(
        self, sides: LayerRotations, averages: Mapping[str, Average], statistic_of: dict[str, str]
    ) -> bool:
        """Whether each side's rotation diagonalises the statistic of the side that `statistic_of`
        names. A statistic that is missing counts as agreeing."""
        for side, other in statistic_of.items():
            kinds = self.recipe.target_kinds(other)
            if not averages.keys() >= set(kinds):
                continue
            if not self._diagonalises(sides[side], sum_moments(averages, kinds)):
                return False
        return True

    def _diagonalises(self, rotation: Rotation, moment: torch.Tensor) -> bool:
        """Whether `U^T C U` is the diagonal matrix of the stored eigenvalues, to a relative error
        of `DIAGONAL`.

        U is the eigenbasis of the rotation and C the second moments `[H, D, D]`.
        """
        assert rotation.eigenvalues is not None
        recipe, dim = self.recipe, rotation.dim
        if dim != moment.shape[-1]:
            return False
        if recipe.pooling == "layer":
            moment = moment.mean(0, keepdim=True)
        eigenvalues = rotation.eigenvalues.double()
        group = recipe.group(dim)
        basis = compositions.recover_basis(rotation.matrix, recipe.composition, group)
        difference = basis.mT @ moment @ basis - torch.diag_embed(eigenvalues)
        allowed = DIAGONAL * eigenvalues.norm(dim=-1)
        return bool((difference.norm(dim=(-2, -1)) <= allowed).all())
