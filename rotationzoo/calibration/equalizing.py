"""The equalizers that a recipe makes from statistics, the statistics in the folded frame, and the
check that stored equalizers are what their recipe makes: invertible, and equal for key channels
that share a factor.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rotationzoo.artifact.tensor_check import sentences
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.compositions import identity
from rotationzoo.linalg.equalization import CONDITION, fold_moments, key_factors, value_matrix
from rotationzoo.linalg.moments import Average, Averages, Moment, Statistics, sums
from rotationzoo.model.geometry import Geometry, Layer, cached_layers
from rotationzoo.model.key_classes import key_classes
from rotationzoo.model.projection import output_projections
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotations

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Equalizers:
    """The equalizers of one layer, float32: what is stored, and what its statistics are folded
    with."""

    key: torch.Tensor
    """Factors `[KV heads, D_k]`."""
    value: torch.Tensor
    """Matrices `[KV heads, D_v, D_v]`."""

    def __getitem__(self, side: str) -> torch.Tensor:
        """The equalizer of a side, `key` or `value`."""
        return {"key": self.key, "value": self.value}[side]

    def fold(self, moments: Mapping[str, Moment]) -> dict[str, Moment]:
        """The layer's moments in the folded frame, by kind."""
        return fold_moments(moments, self.key, self.value)

    def fold_averages(self, averages: Mapping[str, Average]) -> dict[str, Average]:
        """The second moments of the layer's averages in the folded frame, by kind."""
        folded = self.fold({kind: average.sums for kind, average in averages.items()})
        return {kind: Average(moment.second_moment) for kind, moment in folded.items()}


def equalize(
    statistics: Statistics | None, recipe: Recipe, geometry: Geometry
) -> dict[int, Equalizers]:
    """Layer -> its equalizers; empty for a recipe that does not equalize.

    Raises `RotationZooError` where the statistics, or the classes of key channels in the geometry,
    are missing.
    """
    if not recipe.equalize:
        return {}
    if statistics is None:
        raise RotationZooError(f"the recipe {recipe.name} equalizes and needs statistics")
    return {
        layer.index: _equalize_layer(statistics[layer.index], recipe, layer)
        for layer in cached_layers(geometry)
    }


def _equalize_layer(moments: Mapping[str, Moment], recipe: Recipe, layer: Layer) -> Equalizers:
    """The equalizers of one layer. What the recipe centers is taken about its mean."""
    classes = key_classes(layer)
    if classes is None or "projection" not in moments:
        raise RotationZooError(
            f"layer {layer.index} has no statistics to equalize with: they were collected for a "
            "recipe that does not",
            hint="calibrate again with --equalize",
        )
    query = moments["query"].second_moment.cpu()
    factors = key_factors(query, _spread(moments["key"], recipe.center_keys), classes)
    metric = moments["projection"].second_moment.cpu()
    if layer.fixed_values:
        matrix = identity(layer.value_dim).expand_as(metric)
    else:
        matrix = value_matrix(_spread(moments["value"], recipe.center_values), metric)
    return Equalizers(factors.float().contiguous(), matrix.float().contiguous())


def _spread(moment: Moment, centered: bool) -> torch.Tensor:
    """The covariance `[H, D, D]` of rows that are stored without their mean, else their second
    moment."""
    return (moment.covariance if centered else moment.second_moment).cpu()


def stored_equalizers(rotations: Rotations) -> dict[int, Equalizers]:
    """Layer -> the equalizers that rotations carry; empty where they carry none."""
    stored = {}
    for layer, sides in rotations.items():
        key, value = sides.key.equalizer, sides.value.equalizer
        if key is not None and value is not None:
            stored[layer] = Equalizers(key, value)
    return stored


def fold_statistics(statistics: Statistics, equalizers: Mapping[int, Equalizers]) -> Statistics:
    """The statistics in the folded frame; layers without equalizers stay as they are."""
    folded = dict(statistics)
    for layer, equalizer in equalizers.items():
        folded[layer] = equalizer.fold(statistics[layer])
    return folded


@torch.no_grad()
def add_projections(statistics: Statistics, model: "PreTrainedModel", geometry: Geometry) -> None:
    """Add the moment `projection` to each cached layer: the columns `[D_v]` of the output
    projection's weight, of every query head that reads a KV head.

    With it, equalizers can be made again from the statistics of an artifact, without the model, and
    averages of several files merge like all others. Layers that share a cache all count. Raises
    `RotationZooError` where a weight cannot be read.
    """
    projections = output_projections(model, geometry)
    for layer in geometry:
        heads, origin = projections[layer.index].read()
        if heads is None:
            reason = origin.removeprefix("identity: ")
            raise RotationZooError(
                f"values of layer {layer.index} cannot be equalized: {reason}",
                hint="leave --equalize out",
            )
        moments = statistics[layer.owner]
        if layer.owner == layer.index:
            # On the layer's device: products of whole weights in float64 take seconds on a CPU.
            zeros = Moment.zeros(layer.kv_heads, layer.value_dim, heads.device)
            moments["projection"] = zeros
        columns = torch.unflatten(heads, 0, (layer.kv_heads, -1)).transpose(2, 3)
        moments["projection"].add(columns.flatten(1, 2))


# Factors are rounded to powers of two, so factors of re-summed averages may
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
            what = "equalizers that do not come from the stored statistics"
            layers[what].append(layer.index)
    return sentences(layers)


def _layer_problems(stored: Equalizers, layer: Layer) -> list[str]:
    """The faults of one layer's equalizers that show without statistics."""
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
