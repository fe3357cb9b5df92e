"""Is an artifact what it says it is: the bytes that were written, orthogonal, of this geometry, from these statistics?"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rotationzoo import artifact as artifacts
from rotationzoo import card, centering, foreign, layout, rotation
from rotationzoo.artifact import Artifact, clip_ratios
from rotationzoo.errors import RotationZooError, Unsound
from rotationzoo.fit import check_recipe, fit
from rotationzoo.geometry import Geometry, geometry_from_json, shifted_layers
from rotationzoo.layout import sentences
from rotationzoo.manifest import ROTATIONS, STATISTICS
from rotationzoo.moments import tensor_name
from rotationzoo.recipe import Recipe, digest, from_dict
from rotationzoo.source import config_hash, find, has_weights, weights_fingerprint

ORTHOGONAL = 1e-6  # of the stored float32 matrices; measured 8e-8 for D up to 512
# Relative error with which a stored rotation may diagonalise its own statistic; measured 6e-8, and 0.85 and more in that of
# another side or layer.
DIAGONAL = 1e-4

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verification:
    """`problems` is empty when everything holds; `checked` says in words what was looked at and holds.
    `orthogonality_error` is None where no rotation could be read."""

    problems: list[str]
    orthogonality_error: float | None
    checked: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(artifact: Artifact, model: str | None = None, revision: str | None = None) -> Verification:
    """Recompute everything that can be recomputed; with `model`, also whether the artifact was made for it.

    Raises `RotationZooError` only where the check itself cannot be made, such as a model that cannot be found.
    """
    problems = artifact.damaged_files()
    checked = [] if problems else ["checksums"]
    error = None
    try:
        if digest(artifact.manifest["recipe"]) != artifact.manifest["recipe_sha256"]:
            problems.append("the recipe in the manifest is not the one that was used: its sha256 differs")
        sound = _check_files(artifact)
        problems += sound.problems
        error = sound.orthogonality_error
        checked += sound.checked
    except RotationZooError as damage:
        problems += [str(damage)] if str(damage) not in problems else []
    if model is not None:
        found, what = _model_problems(artifact, model, revision)
        problems += found
        checked += [] if found else [what]
    return Verification(problems, error, checked)


def _check_files(artifact: Artifact) -> Verification:
    """The tensors, of which none is read where names, types or shapes are not those of recipe and geometry."""
    rotations, problems = artifact.examine(ROTATIONS)
    statistics = None
    if STATISTICS in artifact.manifest["files"]:
        statistics, others = artifact.examine(STATISTICS)
        problems += others
    if problems:
        return Verification(problems, None, ["geometry", "finiteness"])
    return check(rotations, statistics, artifact.manifest)


def write(folder: Path, rotations: Tensors, statistics: Tensors | None, manifest: dict[str, Any], hint: str) -> Artifact:
    """What every artifact is written by: as `artifacts.write` does it, with its card, of tensors that would pass `verify`.

    Raises `Unsound` with the first problem and `hint` where they would not, and writes nothing then.
    """
    _refuse(check(rotations, statistics, manifest), hint)
    return artifacts.write(folder, rotations, statistics, manifest, card.render)


def check_before_search(rotations: Tensors, statistics: Tensors, recipe: Recipe, geometry: Geometry, hint: str) -> None:
    """Raise `Unsound` where what a recipe makes without its search would not pass: before the search takes its time."""
    bare = recipe.model_copy(update={"search": None})
    clips = {"key": recipe.key_clip, "value": recipe.value_clip}
    _refuse(_check_tensors(rotations, statistics, bare, geometry, clips), hint)


def _refuse(found: Verification, hint: str) -> None:
    if found.problems:
        raise Unsound(f"not written, since it would not pass verify: {found.problems[0]}", hint=hint)


def check(rotations: Tensors, statistics: Tensors | None, manifest: dict[str, Any]) -> Verification:
    """The tensors of an artifact held against its manifest. Raises `RotationZooError` for a manifest that is damaged."""
    recipe = from_dict(manifest["recipe"], "the manifest's recipe")
    geometry = geometry_from_json(manifest["geometry"])
    return _check_tensors(rotations, statistics, recipe, geometry, clip_ratios(manifest), "imported" in manifest)


def _check_tensors(
    rotations: Tensors,
    statistics: Tensors | None,
    recipe: Recipe,
    geometry: Geometry,
    clips: dict[str, float],
    imported: bool = False,
) -> Verification:
    checked = ["geometry", "finiteness"]
    if recipe.composition != rotation.GIVEN:
        check_recipe(recipe, geometry)
    problems = layout.problems(ROTATIONS, rotations, recipe, geometry, imported)
    if statistics is not None:
        problems += layout.problems(STATISTICS, statistics, recipe, geometry, imported)
    if problems:
        return Verification(problems, None, checked)
    error, problems = _orthogonality(rotations, foreign.ORTHOGONAL if imported else ORTHOGONAL)
    problems += _clip_problems(rotations, clips)
    problems += _origin_problems(rotations, statistics, recipe, geometry)
    problems += _mean_problems(rotations, statistics or {}) + _centering_problems(rotations, geometry)
    checked += ["orthogonality", "clip ratios", "agreement with the statistics" if statistics else "the recipe"]
    return Verification(problems, error, checked)


def _orthogonality(rotations: dict[str, torch.Tensor], allowed: float) -> tuple[float, list[str]]:
    layers: dict[str, list[int]] = defaultdict(list)
    worst = 0.0
    for name, tensor in rotations.items():
        if name.endswith(".rotation"):
            error = rotation.orthogonality_error(tensor)
            worst = max(worst, error)
            if not error <= allowed:
                layers[f"{name.split('.')[2]} rotation not orthogonal"].append(int(name.split(".")[1]))
    return worst, sentences(layers)


def _clip_problems(rotations: dict[str, torch.Tensor], clips: dict[str, float]) -> list[str]:
    layers: dict[str, list[int]] = defaultdict(list)
    for name, tensor in rotations.items():
        if name.endswith(".clip"):
            _, index, side, _ = name.split(".")
            if not (tensor == clips[side]).all():
                layers[f"{side} clip ratio not that of the recipe"].append(int(index))
    return sentences(layers)


def _origin_problems(
    rotations: dict[str, torch.Tensor], statistics: dict[str, torch.Tensor] | None, recipe: Recipe, geometry: Geometry
) -> list[str]:
    """Whether the rotations are those that the recipe makes of the statistics, or of nothing."""
    if recipe.composition == rotation.GIVEN or recipe.search is not None:  # learned: no formula makes them again
        return []
    if recipe.has_eigenbasis:
        return _statistics_problems(rotations, statistics, recipe) if statistics is not None else []
    layers: dict[str, list[int]] = defaultdict(list)
    for name, tensor in fit(None, recipe.model_copy(update={"center_keys": False, "center_values": False}), geometry).items():
        if name.endswith(".rotation") and not torch.allclose(tensor, rotations[name], atol=ORTHOGONAL):
            layers[f"{name.split('.')[2]} rotation not the one that {recipe.name} makes"].append(int(name.split(".")[1]))
    return sentences(layers)


def _statistics_problems(rotations: dict[str, torch.Tensor], statistics: dict[str, torch.Tensor], recipe: Recipe) -> list[str]:
    """A rotation's eigenbasis must diagonalise the statistic that it was made from, and not the other side's."""
    kinds = {"key": recipe.key_statistic, "value": recipe.value_statistic}
    layers: dict[str, list[int]] = defaultdict(list)
    for name in rotations:
        if not name.endswith(".key.rotation"):
            continue
        layer = int(name.split(".")[1])
        moments = {of: statistics.get(tensor_name(layer, kind)) for of, kind in kinds.items()}
        fits = {
            (side, of): moment is None or _diagonalises(rotations, moment, f"layers.{layer}.{side}", recipe)
            for side in kinds
            for of, moment in moments.items()
        }
        if fits["key", "key"] and fits["value", "value"]:
            continue
        swapped = fits["key", "value"] and fits["value", "key"]
        what = "key and value swapped" if swapped else "rotations that do not come from the statistics beside them"
        layers[what].append(layer)
    return sentences(layers)


def _mean_problems(rotations: dict[str, torch.Tensor], statistics: dict[str, torch.Tensor]) -> list[str]:
    layers: dict[str, list[int]] = defaultdict(list)
    for name, mean in rotations.items():
        if name.endswith(".mean") and name in statistics and not torch.equal(mean, statistics[name].float()):
            layers[f"{name.split('.')[2]} mean not that of the statistics"].append(int(name.split(".")[1]))
    return sentences(layers)


def _centering_problems(rotations: dict[str, torch.Tensor], geometry: Geometry) -> list[str]:
    """Keys without their mean, where attention is known not to ignore it."""
    moved = shifted_layers(geometry)
    centered = any(name.endswith("key.mean") for name in rotations)
    return [f"keys are stored without their mean: {centering.reason(moved)}"] if centered and moved else []


def _diagonalises(tensors: dict[str, torch.Tensor], moment: torch.Tensor, name: str, recipe: Recipe) -> bool:
    """Whether `U^T C U` is the diagonal of the stored eigenvalues."""
    matrices, eigenvalues = tensors[f"{name}.rotation"], tensors[f"{name}.eigenvalues"].double()
    if matrices.shape[-1] != moment.shape[-1]:
        return False
    moment = moment.mean(0, keepdim=True) if recipe.pooling == "layer" else moment
    basis = rotation.recover_basis(matrices, recipe.composition, recipe.group(matrices.shape[-1]))
    difference = basis.mT @ moment @ basis - torch.diag_embed(eigenvalues)
    return bool((difference.norm(dim=(-2, -1)) <= DIAGONAL * eigenvalues.norm(dim=-1)).all())


def _model_problems(artifact: Artifact, model: str, revision: str | None) -> tuple[list[str], str]:
    """Compare the config and, where the weights are on this machine, their fingerprint; a sentence says which."""
    theirs = artifact.manifest["model"]
    source = find(model, revision)
    if not artifact.bound:
        return ["bound to no model: nobody has said which one the imported files are for"], f"the config of {model}"
    if config_hash(source) != theirs["config_sha256"]:
        return [f"made for another model or config than that of {model}: {theirs['id']}"], f"the config of {model}"
    fingerprint = theirs["weights_fingerprint"]
    if fingerprint and has_weights(source):
        if weights_fingerprint(source) == fingerprint:
            return [], f"the weights of {model}"
        return [f"made for other weights than those of {model}: {theirs['id']}"], f"the weights of {model}"
    what = f"the config of {model}" + (", whose weights are not on this machine" if fingerprint else "")
    if theirs["revision"] and source.revision and source.revision != theirs["revision"]:
        return [f"made for revision {theirs['revision']}, and {model} is at {source.revision}"], what
    return [], what
