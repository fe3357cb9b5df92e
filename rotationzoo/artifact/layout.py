"""The tensors in an artifact's files: their names, shapes and dtypes.

A name is `layers.{layer}.{kind}.{field}`. In `rotations.safetensors` the kind is a side (`key` or
`value`); in `statistics.safetensors` it is what was averaged. No other module knows these names.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rotationzoo.artifact.manifest import ROTATIONS
from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.linalg.moments import Average, Averages
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LATENT, SIDES, LayerRotations, Rotation, Rotations

OPTIONAL = ("eigenvalues", "mean", "feedback", "whitening", "sensitivity", "fine_channels")
"""Fields of a rotation that may be missing; tensors have their names."""
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensor name -> dtype and shape."""


@dataclass(frozen=True)
class Layout:
    """The tensors that a file must hold. Those whose names end in `optional` may be missing."""

    shapes: Shapes
    optional: str | None = None


def tensor_name(layer: int, kind: str, field: str) -> str:
    """The name of a tensor in an artifact's files, such as `layers.0.key.clip`."""
    return f"{side_name(layer, kind)}.{field}"


def side_name(layer: int, side: str) -> str:
    """The prefix that all tensors of one side of a layer share."""
    return f"layers.{layer}.{side}"


def matrix_name(layer: int, side: str) -> str:
    """The name of the rotation of one side of a layer."""
    return tensor_name(layer, side, "rotation")


def split_name(name: str) -> tuple[int, str, str]:
    """The layer, kind and field of a tensor name: the inverse of `tensor_name`."""
    _, layer, kind, field = name.split(".")
    return int(layer), kind, field


def rotation_tensors(rotations: Rotations) -> dict[str, torch.Tensor]:
    """The tensors of `rotations.safetensors` by name."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, side, rotation in rotations.each():
        tensors[matrix_name(layer, side)] = rotation.matrix
        tensors[tensor_name(layer, side, "clip")] = rotation.clip
        for field in OPTIONAL:
            if (tensor := getattr(rotation, field)) is not None:
                tensors[tensor_name(layer, side, field)] = tensor
    return tensors


def rotations_from(tensors: Mapping[str, torch.Tensor]) -> Rotations:
    """Build rotations from tensors by name: the inverse of `rotation_tensors`.

    Raises `KeyError` if a layer lacks one of its matrices or clip ratios.
    """
    layers = sorted({split_name(name)[0] for name in tensors})
    rotations = {}
    for layer in layers:
        is_latent = matrix_name(layer, LATENT) in tensors
        sides = (LATENT,) if is_latent else SIDES
        by_side = {side: _rotation_from(tensors, layer, side) for side in sides}
        rotations[layer] = LayerRotations.of_sides(by_side)
    return Rotations(rotations)


def _rotation_from(tensors: Mapping[str, torch.Tensor], layer: int, side: str) -> Rotation:
    optional = {field: tensors.get(tensor_name(layer, side, field)) for field in OPTIONAL}
    clip = tensors[tensor_name(layer, side, "clip")]
    return Rotation(tensors[matrix_name(layer, side)], clip, **optional)


def statistics_tensors(averages: Averages) -> dict[str, torch.Tensor]:
    """The tensors of `statistics.safetensors` by name.

    Averages are stored with their counts, so that statistics from several files can be merged,
    weighted by count.
    """
    tensors: dict[str, torch.Tensor] = {}
    for layer, kinds in averages.items():
        for kind, average in kinds.items():
            tensors[_moment_name(layer, kind)] = average.second_moment
            if average.mean is not None:
                tensors[tensor_name(layer, kind, "mean")] = average.mean
            if average.count is not None:
                tensors[_count_name(layer, kind)] = average.count
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
        mean = tensors.get(tensor_name(layer, kind, "mean"))
        count = tensors.get(_count_name(layer, kind))
        averages.setdefault(layer, {})[kind] = Average(second_moment, mean, count)
    return averages


# The key-energy moment is a weighted moment of values. Its tensors are therefore named with those
# of the value side, and its total weight is called `key_energy` and not `count`.


def _moment_name(layer: int, kind: str) -> str:
    if kind == "key_energy":
        return tensor_name(layer, "value", "key_energy_moment")
    return tensor_name(layer, kind, "second_moment")


def _count_name(layer: int, kind: str) -> str:
    if kind == "key_energy":
        return tensor_name(layer, "value", "key_energy")
    return tensor_name(layer, kind, "count")


def rotation_shapes(recipe: Recipe, geometry: Geometry) -> Shapes:
    """The dtype and shape of every tensor in `rotations.safetensors`, by name."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        heads = _matrices(recipe, layer.kv_heads)
        for side in layer.sides:
            dim = layer.dims[side]
            fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
                "rotation": (torch.float32, (heads, dim, dim)),
                "eigenvalues": (torch.float32, (heads, dim)),
                "clip": (torch.float64, (layer.kv_heads,)),
            }
            if recipe.centers(side):
                fields["mean"] = torch.float32, (layer.kv_heads, dim)
            if recipe.feedback:
                fields["feedback"] = torch.float32, (layer.kv_heads, dim, dim)
            if recipe.feedback and recipe.whiten:
                fields["whitening"] = torch.float32, (layer.kv_heads, dim, dim)
            if recipe.budget:
                fields |= {"sensitivity": (torch.float64, ()), "fine_channels": (torch.int64, ())}
            for field, shape in fields.items():
                shapes[tensor_name(layer.index, side, field)] = shape
    return shapes


def statistics_shapes(recipe: Recipe, geometry: Geometry) -> Shapes:
    """The dtype and shape of every tensor in `statistics.safetensors`, by name."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        for kind, dim in layer.dims.items():
            moment = torch.float64, (layer.kv_heads, dim, dim)
            shapes[_moment_name(layer.index, kind)] = moment
            shapes[tensor_name(layer.index, kind, "mean")] = torch.float64, (layer.kv_heads, dim)
            shapes[_count_name(layer.index, kind)] = torch.int64, ()
        if recipe.value_statistic == "key_energy":
            moment = torch.float64, (layer.kv_heads, layer.value_dim, layer.value_dim)
            shapes[_moment_name(layer.index, "key_energy")] = moment
            shapes[_count_name(layer.index, "key_energy")] = torch.float64, (layer.kv_heads,)
    return shapes


def recovered_shapes(recipe: Recipe, geometry: Geometry) -> Shapes:
    """The dtypes and shapes of the statistics that are recovered from an imported file's
    eigenvalues and rotations, by name."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        heads = _matrices(recipe, layer.kv_heads)
        for side in layer.sides:
            dim, kinds = layer.dims[side], recipe.target_kinds(side)
            for kind in kinds:
                shapes[_moment_name(layer.index, kind)] = torch.float64, (heads, dim, dim)
    return shapes


def _matrices(recipe: Recipe, kv_heads: int) -> int:
    return 1 if recipe.pooling == "layer" else kv_heads


def expected_layout(file: str, recipe: Recipe, geometry: Geometry, imported: bool) -> Layout:
    """The layout that a file of an artifact must have.

    Imported files may lack eigenvalues; then no statistics can be recovered from them.
    """
    if file == ROTATIONS:
        return Layout(rotation_shapes(recipe, geometry), ".eigenvalues" if imported else None)
    if imported:
        return Layout(recovered_shapes(recipe, geometry), "_moment")
    return Layout(statistics_shapes(recipe, geometry))
