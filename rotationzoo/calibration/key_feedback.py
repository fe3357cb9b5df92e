"""The factors with which a writer chooses key codes by error feedback: made from statistics, and
checked against them."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from rotationzoo.artifact.tensor_check import sentences
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.error_feedback import factorize
from rotationzoo.linalg.moments import PEAKED, Average, Moment
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotation, Rotations

Moments = Mapping[int, Mapping[str, Moment]] | Mapping[int, Mapping[str, Average]]
"""Layer -> kind -> moment, as sums or as averages."""

# 0 was measured with the kernels and the number of threads that wrote them, and with others of the
# same processor; calibrated anew with those, factors differ by 1.4e-5 of the largest. Inverses of
# keys are exact in float32, because the factors of an equalizer are powers of two.
_CLOSE, _NOTHING = 1e-4, 1e-6


def error_metric(rotation: Rotation, peaked_query: torch.Tensor) -> torch.Tensor:
    """The metric `[KV heads, D, D]`, float64, in which queries read errors of rotated keys.

    `peaked_query` is C, the second moment `[KV heads, D, D]` of the queries of the published
    weights, weighted by how peaked their attention is: queries that look something up must read
    keys exactly.
    Stored rows are `y = (x - mean) @ transform`. An error e of y is the error `e @ inverse` of the
    key, and changes the score of a query q by `e @ inverse @ q^T`. The weighted mean square of that
    is `e M e^T` with `M = inverse @ C @ inverse^T`. It is the same where an equalizer is folded
    into the weights, because queries are then divided by it.
    """
    inverse = rotation.inverse.double()
    return inverse @ peaked_query.double().cpu() @ inverse.mT


def add_factors(rotations: Rotations, statistics: Moments | None, recipe: Recipe) -> Rotations:
    """The rotations with the factor of every key side's metric; unchanged for a recipe without
    error feedback.

    Raises `RotationZooError` if there are no statistics.
    """
    if not recipe.feedback:
        return rotations
    if statistics is None:
        raise RotationZooError(f"the recipe {recipe.name} has error feedback and needs statistics")

    def add_factor(layer: int, side: str, rotation: Rotation) -> Rotation:
        if side != "key":
            return rotation
        metric = error_metric(rotation, statistics[layer][PEAKED].second_moment)
        return replace(rotation, feedback=factorize(metric))

    return rotations.replace(add_factor)


def factor_problems(rotations: Rotations, statistics: Moments | None, recipe: Recipe) -> list[str]:
    """One sentence for each kind of problem with the factors, with the layers that have it.

    The tensors must have the shapes that the recipe asks for, and be finite.
    """
    if not recipe.feedback:
        return []
    expected = None if statistics is None else add_factors(rotations, statistics, recipe)
    layers: dict[str, list[int]] = defaultdict(list)
    for layer, sides in rotations.items():
        factor = sides.key.feedback
        assert factor is not None, "a missing factor is a problem of the layout"
        if not torch.equal(factor, factor.triu()):
            layers["key feedback not upper triangular"].append(layer)
        elif not (factor.diagonal(dim1=-2, dim2=-1) > 0).all():
            layers["key feedback without a positive diagonal"].append(layer)
        elif expected is not None and not _agree(factor, expected[layer].key.feedback):
            layers["key feedback not that of the statistics and the rotation"].append(layer)
    return sentences(layers)


def _agree(factor: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Whether a factor is the one that was made again, up to rounding."""
    assert expected is not None
    return torch.allclose(factor, expected, rtol=_CLOSE, atol=_NOTHING)
