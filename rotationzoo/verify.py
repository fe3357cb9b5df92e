"""Is an artifact what it says it is: the bytes that were written, orthogonal, of this geometry, from these statistics?"""

from collections import defaultdict
from dataclasses import dataclass

import torch

from rotationzoo import rotation
from rotationzoo.artifact import Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Recipe
from rotationzoo.source import config_hash, find, has_weights, weights_fingerprint

ORTHOGONAL = 1e-6  # of the stored float32 matrices; measured 1e-7 to 4e-7 for D up to 576
DIAGONAL = 1e-4  # off-diagonal share left by a stored rotation in its own statistic; measured 5e-7, and 0.1 to 1 in another's


@dataclass(frozen=True)
class Verification:
    """`problems` is empty when everything holds; `checked` says in words what was looked at."""

    problems: list[str]
    orthogonality_error: float
    checked: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(artifact: Artifact, model: str | None = None, revision: str | None = None) -> Verification:
    """Recompute everything that can be recomputed; with `model`, also whether the artifact was made for it.

    Raises `RotationZooError` only where the check itself cannot be made, such as a model that cannot be found.
    """
    problems = artifact.damaged_files()
    checked = ["checksums"]
    error = float("nan")
    try:
        recipe = Recipe.model_validate(artifact.manifest["recipe"])
        rotations = artifact.rotations()
        problems += _shape_problems(artifact, rotations)
        checked += ["geometry", "finiteness", "orthogonality"]
        error = max((rotation.orthogonality_error(t) for n, t in rotations.items() if n.endswith(".rotation")), default=error)
        statistics = artifact.statistics()
        if not problems and statistics is not None and recipe.needs_statistics:
            problems += _statistics_problems(rotations, statistics, recipe)
            checked.append("agreement with the statistics")
    except (RotationZooError, KeyError, ValueError) as damage:
        problems.append(str(damage) if isinstance(damage, RotationZooError) else f"the manifest is damaged: {damage}")
    if model is not None:
        found, what = _model_problems(artifact, model, revision)
        problems += found
        checked.append(what)
    return Verification(problems, error, checked)


def _shape_problems(artifact: Artifact, rotations: dict[str, torch.Tensor]) -> list[str]:
    pooled = artifact.manifest["recipe"]["pooling"] == "layer"
    layers: dict[str, list[int]] = defaultdict(list)
    expected = set()
    for layer in artifact.manifest["geometry"]:
        if layer["owner"] != layer["index"]:
            continue
        for side in ("key", "value"):
            heads, dim = 1 if pooled else layer["kv_heads"], layer[f"{side}_dim"]
            name = f"layers.{layer['index']}.{side}"
            shapes = {
                "rotation": (torch.float32, (heads, dim, dim)),
                "eigenvalues": (torch.float32, (heads, dim)),
                "clip": (torch.float64, (layer["kv_heads"],)),
            }
            for kind, shape in shapes.items():
                expected.add(f"{name}.{kind}")
                tensor = rotations.get(f"{name}.{kind}")
                if tensor is None:
                    layers[f"{side} {kind} missing"].append(layer["index"])
                elif (tensor.dtype, tuple(tensor.shape)) != shape:
                    layers[f"{side} {kind} of another shape or type than the model's"].append(layer["index"])
                elif not torch.isfinite(tensor).all():
                    layers[f"{side} {kind} not finite"].append(layer["index"])
                elif kind == "rotation" and not rotation.orthogonality_error(tensor) <= ORTHOGONAL:
                    layers[f"{side} rotation not orthogonal"].append(layer["index"])
    problems = [f"{what}: {_list(where)}" for what, where in layers.items()]
    if extra := sorted(rotations.keys() - expected):
        problems.append(f"tensors that belong to no layer: {', '.join(extra[:4])}")
    return problems


def _statistics_problems(rotations: dict[str, torch.Tensor], statistics: dict[str, torch.Tensor], recipe: Recipe) -> list[str]:
    """A rotation's eigenbasis must diagonalise the statistic that it was made from, and not the other side's."""
    value_kind = "output.second_moment" if recipe.value_statistic == "output" else "value.key_energy_moment"
    kinds = {"key": "query.second_moment", "value": value_kind}
    layers: dict[str, list[int]] = defaultdict(list)
    for name in rotations:
        if not name.endswith(".key.rotation"):
            continue
        layer = name.split(".")[1]
        fits = {
            (side, of): _diagonalises(rotations, statistics[f"layers.{layer}.{kinds[of]}"], f"layers.{layer}.{side}", recipe)
            for side in kinds
            for of in kinds
        }
        if fits["key", "key"] and fits["value", "value"]:
            continue
        swapped = fits["key", "value"] and fits["value", "key"]
        what = "key and value swapped" if swapped else "rotations that do not come from the statistics beside them"
        layers[what].append(int(layer))
    return [f"{what}: {_list(where)}" for what, where in layers.items()]


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
    """Compare config and, where the weights are on this machine, their fingerprint."""
    theirs = artifact.manifest["model"]
    source = find(model, revision)
    if has_weights(source) and theirs["weights_fingerprint"]:
        if weights_fingerprint(source) == theirs["weights_fingerprint"]:
            return [], f"the weights of {model}"
        return [f"made for other weights than those of {model}: {theirs['id']}"], f"the weights of {model}"
    what = f"the config of {model}, whose weights are not on this machine"
    if config_hash(source) != theirs["config_sha256"]:
        return [f"made for another model than {model}: {theirs['id']}"], what
    if theirs["revision"] and source.revision != theirs["revision"]:
        return [f"made for revision {theirs['revision']}, and {model} is at {source.revision}"], what
    return [], what


def _list(layers: list[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
