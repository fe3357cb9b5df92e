"""Makes a recipe's rotations, and the basis of transform coding, from second moments."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch

from rotationzoo.artifact.layout import Problem, matrix_count
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, Layer, cached_layers
from rotationzoo.linalg import compositions, orthogonality
from rotationzoo.linalg.moments import Average, Moment, Statistics, covariance
from rotationzoo.linalg.transform_coding import Transform, decorrelate, keep_basis
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LayerRotations, Rotation, Rotations
from rotationzoo.sides import metric_kind

LayerMoments = Mapping[str, Moment] | Mapping[str, Average]
"""Kind -> moment of one layer, as sums or as averages."""
Moments = Mapping[int, LayerMoments]
"""Layer -> kind -> moment."""

# Largest allowed orthogonality error before the cast to float32; 3e-15 was measured up to D = 512.
EXACT = 1e-12
# Allowed relative difference of a refitted transform; on the same processor there was none.
_CLOSE = 1e-4


def _decorrelate_side(
    moments: LayerMoments, recipe: Recipe, side: str, rotation: Rotation
) -> tuple[Transform, torch.Tensor]:
    """The basis of a side, and the covariance of its rows `[H, D, D]`. Without an eigenbasis, the
    recipe's own rotation is the basis."""
    spread = moments[side].second_moment.double().cpu()
    if recipe.centers(side):
        mean = moments[side].mean
        assert mean is not None
        spread = covariance(spread, mean.double().cpu())
    metric = moments[metric_kind(side)].second_moment
    if recipe.has_eigenbasis:
        return decorrelate(spread, metric), spread
    return keep_basis(rotation.matrix, spread, metric), spread


def transform_problems(
    rotations: Rotations, statistics: Moments | None, recipe: Recipe
) -> Iterator[Problem]:
    """Transforms that do not follow from the statistics. Shapes and values must be valid."""
    if not recipe.transform or statistics is None:
        return
    for layer, side, rotation in rotations.each():
        made, spread = _decorrelate_side(statistics[layer], recipe, side, rotation)
        assert rotation.transform is not None
        stored, deviations = rotation.transform.double(), rotation.deviations
        # A rotation among directions of equal variance is allowed: it changes neither product.
        pairs = [
            (stored @ stored.mT, made.forward @ made.forward.mT),
            (stored.mT @ spread @ stored, made.forward.mT @ spread @ made.forward),
            (deviations, made.deviations.float()),
            (rotation.costs, made.costs),
        ]
        for ours, theirs in pairs:
            assert ours is not None
            allowed = _CLOSE * theirs.abs().amax().item() + torch.finfo(torch.float32).tiny
            if not torch.allclose(ours, theirs, rtol=0, atol=allowed):
                yield f"{side} transform not that of the statistics", layer
                break


def fit(statistics: Statistics | None, recipe: Recipe, geometry: Geometry) -> Rotations:
    """The rotations that a recipe makes from statistics. Raises `RotationZooError` if the recipe
    needs statistics and there are none, and for a rotation that is not orthogonal to `EXACT`."""
    layers = {}
    for layer in cached_layers(geometry):
        rotations = {side: _fit_side(statistics, recipe, layer, side) for side in layer.sides}
        layers[layer.index] = LayerRotations.of_sides(rotations)
    return Rotations(layers)


def target_moment(moments: LayerMoments, recipe: Recipe, side: str) -> torch.Tensor:
    """The second moment `[H, D, D]` for a side's eigenbasis. H is 1 if heads are pooled."""
    second_moment = sum_moments(moments, recipe.target_kinds(side))
    return second_moment.mean(0, keepdim=True) if recipe.pooling == "layer" else second_moment


def sum_moments(moments: LayerMoments, kinds: Sequence[str]) -> torch.Tensor:
    """The sum of the second moments `[H, D, D]` of some kinds, on the CPU."""
    return reduce(torch.add, [moments[kind].second_moment.cpu() for kind in kinds])


def _fit_side(statistics: Statistics | None, recipe: Recipe, layer: Layer, side: str) -> Rotation:
    """The rotation of one side of a layer, with all that the recipe adds to it."""
    eigenvalues, matrix = _compose_side(statistics, recipe, layer, side)
    error = orthogonality.orthogonality_error(matrix)
    if not error <= EXACT:  # not `error > EXACT`, which is False for NaN
        which = f"the {side} rotation of layer {layer.index}"
        raise RotationZooError(f"{which} is not orthogonal: it is off by {error:.1e}")
    clip, mean = torch.full((layer.kv_heads,), recipe.clip(side), dtype=torch.float64), None
    if recipe.centers(side):
        assert statistics is not None
        mean = statistics[layer.index][side].mean.float().cpu().contiguous()
    matrix, eigenvalues = matrix.float().contiguous(), eigenvalues.float().contiguous()
    rotation = Rotation(matrix, clip, eigenvalues, mean)
    if not recipe.transform:
        return rotation
    if statistics is None:
        raise RotationZooError(f"transform coding, as in {recipe.name}, needs statistics")
    made, _ = _decorrelate_side(statistics[layer.index], recipe, side, rotation)
    forward, deviations = made.forward.float().contiguous(), made.deviations.float()
    return replace(rotation, transform=forward, deviations=deviations, costs=made.costs)


def _compose_side(
    statistics: Statistics | None, recipe: Recipe, layer: Layer, side: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eigenvalues `[H, D]` and rotations `[H, D, D]` of a side, in float64."""
    dim = layer.dims[side]
    if recipe.has_eigenbasis:
        if statistics is None:
            raise RotationZooError(f"the composition {recipe.composition} needs statistics")
        moment = target_moment(statistics[layer.index], recipe, side)
        eigenvalues, basis = compositions.eigenbasis(moment)
        return eigenvalues, compositions.compose(basis, recipe.composition, recipe.group(dim))
    matrices = []
    for head in range(matrix_count(recipe, layer.kv_heads)):
        # Each layer, side and head has its own seed, so that its matrix depends on no other.
        words = f"{recipe.seed}.{layer.index}.{side}.{head}".encode()
        seed = int.from_bytes(hashlib.sha256(words).digest()[:7], "little")
        matrices.append(compositions.data_free(dim, recipe.composition, seed))
    return torch.ones(len(matrices), dim, dtype=torch.float64), torch.stack(matrices)
