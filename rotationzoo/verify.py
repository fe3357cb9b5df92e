"""Is an artifact what it says it is: the bytes that were written, orthogonal, of this geometry, from these statistics?"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rotationzoo import artifact as artifacts
from rotationzoo import card, centering, foreign, rotation
from rotationzoo.artifact import Artifact, clip_ratios
from rotationzoo.errors import RotationZooError, Unsound
from rotationzoo.fit import fit
from rotationzoo.geometry import Geometry, cached_layers, geometry_from_json, shifted_layers
from rotationzoo.int2 import LARGEST
from rotationzoo.moments import tensor_name
from rotationzoo.recipe import Recipe, digest, from_dict
from rotationzoo.source import config_hash, find, has_weights, weights_fingerprint

ORTHOGONAL = 1e-6  # of the stored float32 matrices; measured 8e-8 for D up to 512
# Relative error with which a stored rotation may diagonalise its own statistic; measured 6e-8, and 0.85 and more in that of
# another side or layer.
DIAGONAL = 1e-4
SIDES = ("key", "value")

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
        sound = check(artifact.rotations(), artifact.statistics(), artifact.manifest)
        problems += sound.problems
        error = sound.orthogonality_error
        checked += sound.checked
    except RotationZooError as damage:
        problems.append(str(damage))
    if model is not None:
        found, what = _model_problems(artifact, model, revision)
        problems += found
        checked += [] if found else [what]
    return Verification(problems, error, checked)


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
    # A foreign file may lack eigenvalues; what is then known of its statistics is nothing.
    shapes = _tensor_problems(rotations, rotation_shapes(recipe, geometry), ".eigenvalues" if imported else None)
    if statistics is not None:
        expected = _recovered_shapes(recipe, geometry) if imported else _statistics_shapes(recipe, geometry)
        shapes += _tensor_problems(statistics, expected, "_moment" if imported else None)
    if shapes:
        return Verification(shapes, None, checked)
    error, problems = _orthogonality(rotations, foreign.ORTHOGONAL if imported else ORTHOGONAL)
    problems += _clip_problems(rotations, clips)
    problems += _origin_problems(rotations, statistics, recipe, geometry)
    problems += _mean_problems(rotations, statistics or {}) + _centering_problems(rotations, geometry)
    checked += ["orthogonality", "clip ratios", "agreement with the statistics" if statistics else "the recipe"]
    return Verification(problems, error, checked)


Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def rotation_shapes(recipe: Recipe, geometry: Geometry) -> Shapes:
    """Name -> type and shape of every tensor in `rotations.safetensors`."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        for side, dim in zip(SIDES, (layer.key_dim, layer.value_dim), strict=True):
            heads = 1 if recipe.pooling == "layer" else layer.kv_heads
            name = f"layers.{layer.index}.{side}"
            shapes[f"{name}.rotation"] = torch.float32, (heads, dim, dim)
            shapes[f"{name}.eigenvalues"] = torch.float32, (heads, dim)
            shapes[f"{name}.clip"] = torch.float64, (layer.kv_heads,)
            if side in recipe.centered:
                shapes[f"{name}.mean"] = torch.float32, (layer.kv_heads, dim)
    return shapes


def _recovered_shapes(recipe: Recipe, geometry: Geometry) -> Shapes:
    """What eigenvalues and rotations of a foreign file tell of its statistics."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        heads = 1 if recipe.pooling == "layer" else layer.kv_heads
        for kind, dim in ((recipe.key_statistic, layer.key_dim), (recipe.value_statistic, layer.value_dim)):
            shapes[tensor_name(layer.index, kind)] = torch.float64, (heads, dim, dim)
    return shapes


def _statistics_shapes(recipe: Recipe, geometry: Geometry) -> Shapes:
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        dims = {"query": layer.key_dim, "key": layer.key_dim, "output": layer.value_dim, "value": layer.value_dim}
        for kind, dim in dims.items():
            name = f"layers.{layer.index}.{kind}"
            shapes[f"{name}.second_moment"] = torch.float64, (layer.kv_heads, dim, dim)
            shapes[f"{name}.mean"] = torch.float64, (layer.kv_heads, dim)
            shapes[f"{name}.count"] = torch.int64, ()
        if recipe.value_statistic == "key_energy":
            name = f"layers.{layer.index}.value"
            shapes[f"{name}.key_energy_moment"] = torch.float64, (layer.kv_heads, layer.value_dim, layer.value_dim)
            shapes[f"{name}.key_energy"] = torch.float64, (layer.kv_heads,)
    return shapes


def _tensor_problems(tensors: dict[str, torch.Tensor], expected: Shapes, optional: str | None = None) -> list[str]:
    """Missing, misshapen, non-finite and superfluous tensors, one sentence for each kind of trouble; names that end in
    `optional` may be missing."""
    layers: dict[str, list[int]] = defaultdict(list)
    for name, shape in expected.items():
        _, index, side, kind = name.split(".")
        tensor, what = tensors.get(name), f"{side} {kind.replace('_', ' ')}"
        if tensor is None and optional and name.endswith(optional):
            continue
        if tensor is None:
            layers[f"{what} missing"].append(int(index))
        elif (tensor.dtype, tuple(tensor.shape)) != shape:
            layers[f"{what} of another shape or type than the model's"].append(int(index))
        elif not torch.isfinite(tensor).all():
            layers[f"{what} not finite"].append(int(index))
        elif kind == "mean" and tensor.abs().max() > LARGEST:
            layers[f"{what} beyond {LARGEST:.0e}, the most that the codec takes"].append(int(index))
        elif kind == "count" and tensor.item() <= 0:
            layers[f"{what} not positive"].append(int(index))
    problems = _sentences(layers)
    if extra := sorted(tensors.keys() - expected.keys()):
        problems.append(f"tensors that belong to no layer: {', '.join(extra[:4])}")
    return problems


def _orthogonality(rotations: dict[str, torch.Tensor], allowed: float) -> tuple[float, list[str]]:
    layers: dict[str, list[int]] = defaultdict(list)
    worst = 0.0
    for name, tensor in rotations.items():
        if name.endswith(".rotation"):
            error = rotation.orthogonality_error(tensor)
            worst = max(worst, error)
            if not error <= allowed:
                layers[f"{name.split('.')[2]} rotation not orthogonal"].append(int(name.split(".")[1]))
    return worst, _sentences(layers)


def _clip_problems(rotations: dict[str, torch.Tensor], clips: dict[str, float]) -> list[str]:
    layers: dict[str, list[int]] = defaultdict(list)
    for name, tensor in rotations.items():
        if name.endswith(".clip"):
            _, index, side, _ = name.split(".")
            if not (tensor == clips[side]).all():
                layers[f"{side} clip ratio not that of the recipe"].append(int(index))
    return _sentences(layers)


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
    return _sentences(layers)


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
    return _sentences(layers)


def _mean_problems(rotations: dict[str, torch.Tensor], statistics: dict[str, torch.Tensor]) -> list[str]:
    layers: dict[str, list[int]] = defaultdict(list)
    for name, mean in rotations.items():
        if name.endswith(".mean") and name in statistics and not torch.equal(mean, statistics[name].float()):
            layers[f"{name.split('.')[2]} mean not that of the statistics"].append(int(name.split(".")[1]))
    return _sentences(layers)


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


def _sentences(layers: dict[str, list[int]]) -> list[str]:
    """`{"what": [0, 1]}` as `["what: layers 0, 1"]`."""
    return [f"{what}: layer{'s' * (len(n) > 1)} {', '.join(map(str, sorted(n)))}" for what, n in layers.items()]
