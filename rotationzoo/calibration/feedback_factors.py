"""The factors with which a writer chooses codes by error feedback: made from statistics, and
checked against them."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from rotationzoo.artifact.tensor_check import sentences
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.error_feedback import factorize
from rotationzoo.linalg.moments import Average, Moment
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotation, Rotations

Moments = Mapping[int, Mapping[str, Moment]] | Mapping[int, Mapping[str, Average]]
"""Layer -> kind -> moment, as sums or as averages."""

METRIC_KINDS = {"key": "query", "value": "output"}
"""Side -> the statistic in whose second moment errors of its rows count."""
# 0 was measured with the kernels and the number of threads that wrote them, and with others of the
# same processor; calibrated anew with those, factors differ by 1.4e-5 of the largest. Inverses of
# keys are exact in float32, because the factors of an equalizer are powers of two.
_CLOSE, _NOTHING = 1e-4, 1e-6


def error_metric(rotation: Rotation, moment: torch.Tensor) -> torch.Tensor:
    """The metric `[KV heads, D, D]`, float64, in which errors of rotated rows count.

    `moment` is C, the second moment `[KV heads, D, D]` of the published weights: `C_Q` of the
    queries for keys, `C_S` of the attention outputs for values. Stored rows are
    `y = (x - mean) @ transform`, so an error e of y is the error `e @ inverse` of x, and
    `M = inverse @ C @ inverse^T`. For keys, `e M e^T` is the mean square of the change of a score;
    it is the same where an equalizer is folded into the weights, because queries are then divided
    by it. For values, C_S is what OSCAR weights errors with; docs/ablation.md measured it beside
    the metric of the output projection.
    """
    inverse = rotation.inverse.double()
    return inverse @ moment.double().cpu() @ inverse.mT


def add_factors(rotations: Rotations, statistics: Moments | None, recipe: Recipe) -> Rotations:
    """The rotations with the factors of both sides' metrics; unchanged for a recipe without error
    feedback.

    Raises `RotationZooError` if there are no statistics.
    """
    if not recipe.feedback:
        return rotations
    if statistics is None:
        raise RotationZooError(f"the recipe {recipe.name} has error feedback and needs statistics")

    def add_factor(layer: int, side: str, rotation: Rotation) -> Rotation:
        moment = statistics[layer][METRIC_KINDS[side]].second_moment
        return replace(rotation, feedback=factorize(error_metric(rotation, moment)))

    return rotations.replace(add_factor)


def factor_problems(rotations: Rotations, statistics: Moments | None, recipe: Recipe) -> list[str]:
    """One sentence for each kind of problem with the factors, with the layers that have it.

    The tensors must have the shapes that the recipe asks for, and be finite.
    """
    if not recipe.feedback:
        return []
    expected = None if statistics is None else add_factors(rotations, statistics, recipe)
    layers: dict[str, list[int]] = defaultdict(list)
    for layer, side, rotation in rotations.each():
        factor = rotation.feedback
        assert factor is not None, "a missing factor is a problem of the layout"
        if not torch.equal(factor, factor.triu()):
            layers[f"{side} feedback not upper triangular"].append(layer)
        elif not (factor.diagonal(dim1=-2, dim2=-1) > 0).all():
            layers[f"{side} feedback without a positive diagonal"].append(layer)
        elif expected is not None and not _agree(factor, expected[layer][side].feedback):
            layers[f"{side} feedback not that of the statistics and the rotation"].append(layer)
    return sentences(layers)


def _agree(factor: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Whether a factor is the one that was made again, up to rounding."""
    assert expected is not None
    return torch.allclose(factor, expected, rtol=_CLOSE, atol=_NOTHING)
