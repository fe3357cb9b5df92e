"""The tensors of rotations in an artifact's files: their names, shapes and dtypes.

A name is `layers.{layer}.{kind}.{field}`. In `rotations.safetensors` the kind is a side
(`rotationzoo.sides`); in `statistics.safetensors` it is what was averaged
(`artifact.statistics_layout`). No other module knows these names.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LayerRotations, Rotation, Rotations
from rotationzoo.sides import rows_of

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


def split_name(name: str) -> tuple[int, str, str]:
    """The layer, kind and field of a tensor name: the inverse of `tensor_name`."""
    _, layer, kind, field = name.split(".")
    return int(layer), kind, field


def rotation_tensors(rotations: Rotations) -> dict[str, torch.Tensor]:
    """The tensors of `rotations.safetensors` by name."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, side, rotation in rotations.each():
        tensors[tensor_name(layer, side, "rotation")] = rotation.matrix
        tensors[tensor_name(layer, side, "clip")] = rotation.clip
        for field in OPTIONAL:
            if (tensor := getattr(rotation, field)) is not None:
                tensors[tensor_name(layer, side, field)] = tensor
    return tensors


def rotations_from(tensors: Mapping[str, torch.Tensor]) -> Rotations:
    """Build rotations from tensors by name: the inverse of `rotation_tensors`. Raises `KeyError` if
    a layer lacks one of its matrices or clip ratios."""
    found: dict[int, set[str]] = {}
    for layer, side, _ in map(split_name, tensors):
        found.setdefault(layer, set()).add(side)
    rotations = {}
    for layer, sides in sorted(found.items()):
        by_side = {}
        for side in rows_of(sides).sides:
            matrix, clip = (tensors[tensor_name(layer, side, it)] for it in ("rotation", "clip"))
            optional = {field: tensors.get(tensor_name(layer, side, field)) for field in OPTIONAL}
            by_side[side] = Rotation(matrix, clip, **optional)
        rotations[layer] = LayerRotations.of_sides(by_side)
    return Rotations(rotations)


def rotation_layout(recipe: Recipe, geometry: Geometry, imported: bool) -> Layout:
    """The tensors that `rotations.safetensors` must hold. Imported files may lack eigenvalues."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        heads = matrix_count(recipe, layer.kv_heads)
        for side in layer.sides:
            dim = layer.dims[side]
            fields: Shapes = {
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
    return Layout(shapes, ".eigenvalues" if imported else None)


def matrix_count(recipe: Recipe, kv_heads: int) -> int:
    """How many matrices a side of a layer has."""
    return 1 if recipe.pooling == "layer" else kv_heads
