"""The claims of a manifest about its tensors, and where they contradict it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rotationzoo.artifact.layout import expected_layout, rotation_tensors, statistics_tensors
from rotationzoo.artifact.manifest import ROTATIONS, STATISTICS
from rotationzoo.artifact.tensor_check import sentences, tensor_problems
from rotationzoo.calibration.fit import factor_problems, fit
from rotationzoo.linalg import compositions
from rotationzoo.linalg.moments import Average, Averages
from rotationzoo.model import centering
from rotationzoo.model.geometry import Geometry, geometry_from_json, shifted_layers
from rotationzoo.recipe import Recipe, from_dict
from rotationzoo.rotations import SIDES, LayerRotations, Rotation, Rotations

# Largest relative error with which a stored rotation may diagonalise its own statistic. 6e-8 was
# measured, against 0.85 and more for the statistic of another side or layer.
DIAGONAL = 1e-4

_Layers = dict[str, list[int]]
"""Problem -> the layers that have it."""


@dataclass(frozen=True)
class Claim:
    """The statements of a manifest or a recipe about rotations and statistics.

    The methods return one sentence for each kind of problem, with the layers that have it.
    """

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
        layout = expected_layout(ROTATIONS, *claimed)
        problems = tensor_problems(rotation_tensors(rotations), layout)
        if statistics is not None:
            layout = expected_layout(STATISTICS, *claimed)
            problems += tensor_problems(statistics_tensors(statistics), layout)
        return problems

    def orthogonality_problems(self, rotations: Rotations) -> list[str]:
        """Matrices that are not orthogonal."""
        allowed = compositions.allowed_error(self.imported)
        layers: _Layers = defaultdict(list)
        for layer, side, rotation in rotations.each():
            error = compositions.orthogonality_error(rotation.matrix)
            if not error <= allowed:  # not `error > allowed`, which is False for a NaN
                layers[f"{side} rotation not orthogonal"].append(layer)
        return sentences(layers)

    def clip_problems(self, rotations: Rotations) -> list[str]:
        """Clip ratios that differ from the recipe's."""
        clips = {"key": self.recipe.key_clip, "value": self.recipe.value_clip}
        layers: _Layers = defaultdict(list)
        for layer, side, rotation in rotations.each():
            if not (rotation.clip == clips[side]).all():
                layers[f"{side} clip ratio not that of the recipe"].append(layer)
        return sentences(layers)

    def origin_problems(self, rotations: Rotations, statistics: Averages | None) -> list[str]:
        """Rotations that the recipe would not make from the statistics, or from no data at all.

        Rotations that were imported without their formula are not checked.
        """
        recipe = self.recipe
        if recipe.composition == compositions.GIVEN:
            return []
        if not recipe.has_eigenbasis:
            return self._formula_problems(rotations)
        if statistics is None:
            return []
        return self._eigenbasis_problems(rotations, statistics)

    def mean_problems(self, rotations: Rotations, statistics: Averages) -> list[str]:
        """Means that differ from the statistics'."""
        layers: _Layers = defaultdict(list)
        for layer, side, rotation in rotations.each():
            average = statistics.get(layer, {}).get(side)
            if rotation.mean is None or average is None or average.mean is None:
                continue
            if not torch.equal(rotation.mean, average.mean.float()):
                layers[f"{side} mean not that of the statistics"].append(layer)
        return sentences(layers)

    def factor_problems(self, rotations: Rotations, statistics: Averages | None) -> list[str]:
        """Factors of error feedback that are not triangular, or that the statistics and the
        rotations do not make."""
        return factor_problems(rotations, statistics, self.recipe)

    def centering_problems(self, rotations: Rotations) -> list[str]:
        """Keys stored without their mean, although a layer's attention is known not to ignore
        it."""
        moved = shifted_layers(self.geometry)
        centered = any(sides.key.mean is not None for sides in rotations.values())
        if centered and moved:
            return [f"keys are stored without their mean: {centering.reason(moved)}"]
        return []

    def _formula_problems(self, rotations: Rotations) -> list[str]:
        """Rotations that differ from those that a recipe without an eigenbasis makes, which are
        recomputed."""
        # Leave out what comes from statistics, which is checked elsewhere.
        measured = "center_keys", "center_values", "feedback"
        formula = dict.fromkeys(measured, False)
        alone = self.recipe.model_copy(update=formula)
        layers: _Layers = defaultdict(list)
        for layer, side, rotation in fit(None, alone, self.geometry).each():
            stored = rotations[layer][side].matrix
            if not torch.allclose(rotation.matrix, stored, atol=compositions.ORTHOGONAL):
                what = f"{side} rotation not the one that {self.recipe.name} makes"
                layers[what].append(layer)
        return sentences(layers)

    def _eigenbasis_problems(self, rotations: Rotations, statistics: Averages) -> list[str]:
        """Rotations whose eigenbasis does not diagonalise the statistic that they were made
        from."""
        layers: _Layers = defaultdict(list)
        for layer, sides in rotations.items():
            averages = statistics.get(layer, {})
            if self._diagonalise(sides, averages, {"key": "key", "value": "value"}):
                continue
            # Swapped sides are the likeliest mistake, so they get a message of their own.
            if self._diagonalise(sides, averages, {"key": "value", "value": "key"}):
                layers["key and value swapped"].append(layer)
            else:
                what = "rotations that do not come from the stored statistics"
                layers[what].append(layer)
        return sentences(layers)

    def _diagonalise(
        self, sides: LayerRotations, averages: Mapping[str, Average], statistic_of: dict[str, str]
    ) -> bool:
        """Whether each side's rotation diagonalises the statistic of the side that `statistic_of`
        names. A statistic that is missing counts as agreeing."""
        kinds = {"key": self.recipe.key_statistic, "value": self.recipe.value_statistic}
        for side in SIDES:
            average = averages.get(kinds[statistic_of[side]])
            if average is None:
                continue
            if not self._diagonalises(sides[side], average.second_moment):
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
