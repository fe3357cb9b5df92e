"""The tensors of statistics in an artifact's files: their names, shapes and dtypes."""

from collections.abc import Mapping

import torch

from rotationzoo.artifact.layout import Layout, Shapes, matrix_count, split_name, tensor_name
from rotationzoo.geometry import Geometry, Layer, cached_layers
from rotationzoo.linalg.moments import Average, Averages
from rotationzoo.recipe import Recipe

_OF_KEY_ENERGY = {"second_moment": "key_energy_moment", "count": "key_energy"}


def statistic_dims(layer: Layer, recipe: Recipe) -> dict[str, int]:
    """Kind -> the dimension of each moment that a calibration keeps of a layer."""
    dims = layer.dims
    if recipe.value_statistic == "key_energy" and "value" in dims:
        dims["key_energy"] = layer.value_dim
    return dims


def statistics_tensors(averages: Averages) -> dict[str, torch.Tensor]:
    """The tensors of `statistics.safetensors` by name. Averages have their counts, so that
    statistics from several files can be merged."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, kinds in averages.items():
        for kind, average in kinds.items():
            for field in ("second_moment", "mean", "count"):
                if (tensor := getattr(average, field)) is not None:
                    tensors[_name(layer, kind, field)] = tensor
    return tensors


def statistics_from(tensors: Mapping[str, torch.Tensor]) -> Averages:
    """Build averages from tensors by name: the inverse of `statistics_tensors`."""
    averages: Averages = {}
    for name, second_moment in tensors.items():
        layer, kind, field = split_name(name)
        # Each average has exactly one second moment, which leads to its mean and its count.
        if field not in ("second_moment", "key_energy_moment"):
            continue
        kind = "key_energy" if field == "key_energy_moment" else kind
        mean, count = (tensors.get(_name(layer, kind, rest)) for rest in ("mean", "count"))
        averages.setdefault(layer, {})[kind] = Average(second_moment, mean, count)
    return averages


def _name(layer: int, kind: str, field: str) -> str:
    # The key-energy moment is a weighted moment of values. Its tensors are therefore named with
    # those of the value side, and its total weight is called `key_energy` and not `count`.
    if kind == "key_energy" and field in _OF_KEY_ENERGY:
        return tensor_name(layer, "value", _OF_KEY_ENERGY[field])
    return tensor_name(layer, kind, field)


def statistics_layout(recipe: Recipe, geometry: Geometry, imported: bool) -> Layout:
    """The tensors that `statistics.safetensors` must hold. Imported files may lack eigenvalues;
    then no statistics can be recovered from them."""
    if imported:
        return Layout(_recovered_shapes(recipe, geometry), "_moment")
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        for kind, dim in statistic_dims(layer, recipe).items():
            moment = torch.float64, (layer.kv_heads, dim, dim)
            shapes[_name(layer.index, kind, "second_moment")] = moment
            if kind == "key_energy":
                count = torch.float64, (layer.kv_heads,)
                shapes[_name(layer.index, kind, "count")] = count
                continue
            shapes[_name(layer.index, kind, "mean")] = torch.float64, (layer.kv_heads, dim)
            shapes[_name(layer.index, kind, "count")] = torch.int64, ()
    return Layout(shapes)


def _recovered_shapes(recipe: Recipe, geometry: Geometry) -> Shapes:
    """The statistics that are recovered from an imported file's eigenvalues and rotations."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        heads = matrix_count(recipe, layer.kv_heads)
        for side in layer.sides:
            moment = torch.float64, (heads, layer.dims[side], layer.dims[side])
            for kind in recipe.target_kinds(side):
                shapes[_name(layer.index, kind, "second_moment")] = moment
    return shapes
