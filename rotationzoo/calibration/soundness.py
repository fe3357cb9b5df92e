"""Rotations and statistics held against the recipe and geometry they claim: every artifact is
written through this check."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.layout import expected_layout, rotation_tensors, statistics_tensors
from rotationzoo.artifact.manifest import ROTATIONS, STATISTICS
from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.tensor_check import sentences, tensor_problems
from rotationzoo.artifact.writer import write_artifact
from rotationzoo.calibration.fit import check_recipe, fit
from rotationzoo.errors import Unsound
from rotationzoo.linalg import compositions
from rotationzoo.linalg.moments import Averages
from rotationzoo.model import centering
from rotationzoo.model.geometry import Geometry, geometry_from_json, shifted_layers
from rotationzoo.recipe import Recipe, from_dict
from rotationzoo.rotations import SIDES, Rotation, Rotations

ORTHOGONAL = 1e-6  # of the stored float32 matrices; measured 8e-8 for D up to 512
ORTHOGONAL_IMPORTED = 5e-3  # what SGLang's own loader allows; the published files have 3e-8
# Relative error with which a stored rotation may diagonalise its own statistic; measured 6e-8, and
# 0.85 and more in that of another side or layer.
DIAGONAL = 1e-4

_Layers = dict[str, list[int]]  # what is wrong -> the layers where it is


@dataclass(frozen=True)
class Verification:
    """`problems` is empty when everything holds; `checked` says in words what was looked at and
    holds. `orthogonality_error` is None where no rotation could be read."""

    problems: list[str]
    orthogonality_error: float | None
    checked: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class _Claim:
    """What a manifest says of the tensors beside it."""

    recipe: Recipe
    geometry: Geometry
    clips: dict[str, float]
    imported: bool = False


def write(
    folder: Path,
    rotations: Rotations,
    statistics: Averages | None,
    content: dict[str, Any],
    hint: str,
) -> Artifact:
    """Write an artifact with its card, of rotations and statistics that would pass `verify`.

    Raises `Unsound` with the first problem and `hint` where they would not, and writes nothing
    then.
    """
    _refuse(check(rotations, statistics, content), hint)
    return write_artifact(folder, rotations, statistics, content)


def check_before_search(
    rotations: Rotations, statistics: Averages, recipe: Recipe, geometry: Geometry, hint: str
) -> None:
    """Raise `Unsound` where what a recipe makes without its search would not pass: before the
    search takes its time."""
    bare = recipe.model_copy(update={"search": None})
    clips = {"key": recipe.key_clip, "value": recipe.value_clip}
    _refuse(_check_claim(rotations, statistics, _Claim(bare, geometry, clips)), hint)


def _refuse(verification: Verification, hint: str) -> None:
    if verification.problems:
        raise Unsound(
            f"not written, since it would not pass verify: {verification.problems[0]}", hint=hint
        )


def check(
    rotations: Rotations, statistics: Averages | None, content: dict[str, Any]
) -> Verification:
    """Hold rotations and statistics against the content of a manifest. Raises `RotationZooError`
    for one that is damaged."""
    recipe = from_dict(content["recipe"], "the manifest's recipe")
    geometry = geometry_from_json(content["geometry"])
    clips = {"key": recipe.key_clip, "value": recipe.value_clip}
    if "search" in content:
        clips = {side: content["search"]["model"][side]["clip"] for side in SIDES}
    claim = _Claim(recipe, geometry, clips, "imported" in content)
    return _check_claim(rotations, statistics, claim)


def _check_claim(rotations: Rotations, statistics: Averages | None, claim: _Claim) -> Verification:
    checked = ["geometry", "finiteness"]
    if claim.recipe.composition != compositions.GIVEN:
        check_recipe(claim.recipe, claim.geometry)
    if problems := _layout_problems(rotations, statistics, claim):
        return Verification(problems, None, checked)
    problems = _orthogonality_problems(rotations, claim)
    problems += _clip_problems(rotations, claim)
    problems += _origin_problems(rotations, statistics, claim)
    problems += _mean_problems(rotations, statistics or {})
    problems += _centering_problems(rotations, claim)
    origin = "agreement with the statistics" if statistics else "the recipe"
    checked += ["orthogonality", "clip ratios", origin]
    return Verification(problems, rotations.orthogonality_error, checked)


def _layout_problems(rotations: Rotations, statistics: Averages | None, claim: _Claim) -> list[str]:
    claimed = claim.recipe, claim.geometry, claim.imported
    layout = expected_layout(ROTATIONS, *claimed)
    problems = tensor_problems(rotation_tensors(rotations), layout)
    if statistics is not None:
        layout = expected_layout(STATISTICS, *claimed)
        problems += tensor_problems(statistics_tensors(statistics), layout)
    return problems


def _orthogonality_problems(rotations: Rotations, claim: _Claim) -> list[str]:
    allowed = ORTHOGONAL_IMPORTED if claim.imported else ORTHOGONAL
    layers: _Layers = defaultdict(list)
    for layer, side, rotation in rotations.each():
        if not compositions.orthogonality_error(rotation.matrix) <= allowed:
            layers[f"{side} rotation not orthogonal"].append(layer)
    return sentences(layers)


def _clip_problems(rotations: Rotations, claim: _Claim) -> list[str]:
    layers: _Layers = defaultdict(list)
    for layer, side, rotation in rotations.each():
        if not (rotation.clip == claim.clips[side]).all():
            layers[f"{side} clip ratio not that of the recipe"].append(layer)
    return sentences(layers)


def _origin_problems(rotations: Rotations, statistics: Averages | None, claim: _Claim) -> list[str]:
    """Whether the rotations are those that the recipe makes of the statistics, or of nothing."""
    recipe = claim.recipe
    if (
        recipe.composition == compositions.GIVEN or recipe.search is not None
    ):  # learned: no formula makes them again
        return []
    if recipe.has_eigenbasis:
        return _statistics_problems(rotations, statistics, recipe) if statistics is not None else []
    uncentered = recipe.model_copy(update={"center_keys": False, "center_values": False})
    expected = fit(None, uncentered, claim.geometry)
    layers: _Layers = defaultdict(list)
    for layer, side, rotation in expected.each():
        if not torch.allclose(rotation.matrix, rotations[layer][side].matrix, atol=ORTHOGONAL):
            layers[f"{side} rotation not the one that {recipe.name} makes"].append(layer)
    return sentences(layers)


def _statistics_problems(rotations: Rotations, statistics: Averages, recipe: Recipe) -> list[str]:
    """A rotation's eigenbasis must diagonalise the statistic that it was made from, and not the
    other side's."""
    kinds = {"key": recipe.key_statistic, "value": recipe.value_statistic}
    layers: _Layers = defaultdict(list)
    for layer, sides in rotations.items():
        known = statistics.get(layer, {})
        fits = {}
        for side, of in product(SIDES, SIDES):
            average = known.get(kinds[of])
            fits[side, of] = average is None or _diagonalises(
                sides[side], average.second_moment, recipe
            )
        if fits["key", "key"] and fits["value", "value"]:
            continue
        swapped = fits["key", "value"] and fits["value", "key"]
        what = (
            "key and value swapped"
            if swapped
            else "rotations that do not come from the statistics beside them"
        )
        layers[what].append(layer)
    return sentences(layers)


def _mean_problems(rotations: Rotations, statistics: Averages) -> list[str]:
    layers: _Layers = defaultdict(list)
    for layer, side, rotation in rotations.each():
        average = statistics.get(layer, {}).get(side)
        if rotation.mean is None or average is None or average.mean is None:
            continue
        if not torch.equal(rotation.mean, average.mean.float()):
            layers[f"{side} mean not that of the statistics"].append(layer)
    return sentences(layers)


def _centering_problems(rotations: Rotations, claim: _Claim) -> list[str]:
    """Keys without their mean, where attention is known not to ignore it."""
    moved = shifted_layers(claim.geometry)
    centered = any(sides.key.mean is not None for sides in rotations.values())
    return (
        [f"keys are stored without their mean: {centering.reason(moved)}"]
        if centered and moved
        else []
    )


def _diagonalises(rotation: Rotation, moment: torch.Tensor, recipe: Recipe) -> bool:
    """Whether `U^T C U` is the diagonal of the stored eigenvalues."""
    assert rotation.eigenvalues is not None
    if rotation.dim != moment.shape[-1]:
        return False
    if recipe.pooling == "layer":
        moment = moment.mean(0, keepdim=True)
    eigenvalues = rotation.eigenvalues.double()
    basis = compositions.recover_basis(
        rotation.matrix, recipe.composition, recipe.group(rotation.dim)
    )
    difference = basis.mT @ moment @ basis - torch.diag_embed(eigenvalues)
    return bool((difference.norm(dim=(-2, -1)) <= DIAGONAL * eigenvalues.norm(dim=-1)).all())
