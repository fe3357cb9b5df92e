"""Composes the rotations that a recipe asks for from second moments: equalizers first, factors of
error feedback last."""

import hashlib
from dataclasses import replace

import torch

from rotationzoo.calibration.equalizing import equalize, fold_statistics
from rotationzoo.calibration.feedback_factors import add_factors
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg import compositions
from rotationzoo.linalg.moments import Statistics
from rotationzoo.model.geometry import Geometry, Layer, cached_layers
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import SIDES, LayerRotations, Rotation, Rotations

# Allowed orthogonality error before the cast to float32; 3e-15 was measured for D up to 512.
EXACT = 1e-12


def fit(statistics: Statistics | None, recipe: Recipe, geometry: Geometry) -> Rotations:
    """The rotations that a recipe makes from statistics; None will do for a recipe that needs none.

    Where the recipe equalizes, rotations are composed from the moments in the folded frame; means
    stay those of the published weights. Raises `RotationZooError` if a rotation is not orthogonal
    to 1e-12 before it is cast to float32, or if what the recipe needs is missing.
    """
    equalizers = equalize(statistics, recipe, geometry)
    folded = None if statistics is None else fold_statistics(statistics, equalizers)
    layers = {}
    for layer in cached_layers(geometry):
        key, value = (_fit_side(folded, recipe, layer, side) for side in SIDES)
        layers[layer.index] = LayerRotations(key, value)
    rotations = Rotations(layers)

    def complete(layer: int, side: str, rotation: Rotation) -> Rotation:
        equalizer = equalizers[layer][side] if layer in equalizers else None
        return replace(rotation, mean=_mean(statistics, recipe, layer, side), equalizer=equalizer)

    return add_factors(rotations.replace(complete), statistics, recipe)


def target_moment(statistics: Statistics, recipe: Recipe, layer: int, side: str) -> torch.Tensor:
    """The second moment `[H, D, D]` whose eigenbasis one side uses. H is 1 if the recipe pools the
    heads of a layer."""
    kind = recipe.key_statistic if side == "key" else recipe.value_statistic
    second_moment = statistics[layer][kind].second_moment.cpu()
    return second_moment.mean(0, keepdim=True) if recipe.pooling == "layer" else second_moment


def _fit_side(statistics: Statistics | None, recipe: Recipe, layer: Layer, side: str) -> Rotation:
    """The rotation of one side of a layer, with its eigenvalues and clip ratios."""
    eigenvalues, matrix = _compose_side(statistics, recipe, layer, side)
    error = compositions.orthogonality_error(matrix)
    if not error <= EXACT:  # not `error > EXACT`, which is False for a NaN
        raise RotationZooError(
            f"the {side} rotation of layer {layer.index} is off orthogonality by {error:.1e}"
        )
    ratio = recipe.key_clip if side == "key" else recipe.value_clip
    clip = torch.full((layer.kv_heads,), ratio, dtype=torch.float64)
    return Rotation(matrix.float().contiguous(), clip, eigenvalues.float().contiguous())


def _mean(
    statistics: Statistics | None, recipe: Recipe, layer: int, side: str
) -> torch.Tensor | None:
    """The mean `[H, D]` that a side is stored without, in the frame of the published weights; None
    where the recipe does not center it."""
    if side not in recipe.centered:
        return None
    assert statistics is not None
    return statistics[layer][side].mean.float().cpu().contiguous()


def _compose_side(
    statistics: Statistics | None, recipe: Recipe, layer: Layer, side: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues `[H, D]` and rotations `[H, D, D]`, float64."""
    dim = layer.key_dim if side == "key" else layer.value_dim
    if recipe.has_eigenbasis:
        if statistics is None:
            raise RotationZooError(f"the composition {recipe.composition} needs statistics")
        moment = target_moment(statistics, recipe, layer.index, side)
        eigenvalues, basis = compositions.eigenbasis(moment)
        return eigenvalues, compositions.compose(basis, recipe.composition, recipe.group(dim))
    heads = range(1 if recipe.pooling == "layer" else layer.kv_heads)
    seeds = [_seed(recipe.seed, layer.index, side, head) for head in heads]
    matrices = [compositions.data_free(dim, recipe.composition, seed) for seed in seeds]
    return torch.ones(len(heads), dim, dtype=torch.float64), torch.stack(matrices)


def _seed(*parts: int | str) -> int:
    """An independent seed for each layer, side and head.

    A hash keeps the seed of one matrix the same whatever other matrices are made.
    """
    words = ".".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:7], "little")
