"""Whether equalizers are what their recipe makes: invertible, equal for key channels that share a
factor, and those of the statistics."""

from collections import defaultdict

import torch

from rotationzoo.artifact.tensor_check import sentences
from rotationzoo.calibration.equalizing import Equalizers, equalize, stored_equalizers
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.equalization import CONDITION
from rotationzoo.linalg.moments import Averages, sums
from rotationzoo.model.geometry import Geometry, Layer, cached_layers
from rotationzoo.model.key_classes import key_classes
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotations

# Factors are rounded to powers of two, so those of averages that were divided and summed again may
# fall on the other side of a half.
_ROUNDED = 2.0
# Relative, for value matrices. 0 was measured with the kernels and the number of threads that wrote
# them, and 1.1e-7 with other kernels of the same processor.
_CLOSE = 1e-4


def equalizer_problems(
    rotations: Rotations, statistics: Averages | None, recipe: Recipe, geometry: Geometry
) -> list[str]:
    """One sentence for each kind of problem, with the layers that have it.

    The tensors must have the shapes that the recipe asks for, and be finite.
    """
    if not recipe.equalize:
        return []
    layers: dict[str, list[int]] = defaultdict(list)
    stored = stored_equalizers(rotations)
    for layer in cached_layers(geometry):
        for problem in _layer_problems(stored[layer.index], layer):
            layers[problem].append(layer.index)
    if layers or statistics is None:
        return sentences(layers)
    for layer in cached_layers(geometry):
        # One layer at a time, because the sums of all are as large as the statistics.
        moments = sums({layer.index: statistics.get(layer.index, {})})
        try:
            expected = equalize(moments, recipe, [layer])[layer.index]
        except RotationZooError as error:
            return [str(error)]
        if not _agree(stored[layer.index], expected):
            what = "equalizers that do not come from the statistics beside them"
            layers[what].append(layer.index)
    return sentences(layers)


def _layer_problems(stored: Equalizers, layer: Layer) -> list[str]:
    """What is wrong with the equalizers of one layer, whatever the statistics are."""
    classes = key_classes(layer)
    if classes is None:
        return ["equalized, and the geometry does not say which key channels share a factor"]
    problems, factors = [], stored.key
    if not (factors > 0).all():
        problems.append("key equalizer not positive")
    elif not torch.equal(factors, torch.exp2(factors.log2().round())):
        problems.append("key equalizer not made of powers of two")
    if not torch.equal(factors, factors.flatten()[classes]):
        problems.append("key equalizer differs between channels that share a factor")
    unchanged = torch.eye(layer.value_dim).expand_as(stored.value)
    if layer.fixed_values and not torch.equal(stored.value, unchanged):
        problems.append("value equalizer that no weights of the model can carry")
    condition = torch.linalg.cond(stored.value.double())
    if not (condition <= 1.01 * CONDITION).all():  # infinite for a matrix without an inverse
        problems.append(f"value equalizer of a condition number above {CONDITION:.0f}")
    return problems


def _agree(stored: Equalizers, expected: Equalizers) -> bool:
    """Whether equalizers are those that were made again, up to rounding."""
    ratio = stored.key / expected.key
    rounded = torch.maximum(ratio, 1 / ratio) <= _ROUNDED
    difference = (stored.value - expected.value).norm()
    return bool(rounded.all() and difference <= _CLOSE * expected.value.norm())
