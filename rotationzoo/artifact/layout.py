"""The tensors in an artifact's files: names, required shapes and dtypes, and checks.

A name is `layers.{layer}.{kind}.{field}`. In `rotations.safetensors` the kind is a side
(`rotationzoo.sides`), in `statistics.safetensors` a statistic. Only this module has these names.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rotationzoo.codec.int2 import LARGEST
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, Layer, cached_layers
from rotationzoo.linalg.moments import Average, Averages
from rotationzoo.linalg.orthogonality import is_orthogonal
from rotationzoo.linalg.transform_coding import SEGMENT
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LayerRotations, Rotation, Rotations
from rotationzoo.sides import metric_kind, rows_of

OPTIONAL = "eigenvalues", "mean", "transform", "deviations", "costs", "widths"
"""The fields of a rotation that may be missing, and the names of their tensors."""
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensor name -> dtype and shape."""
_OF_KEY_ENERGY = {"second_moment": "key_energy_moment", "count": "key_energy"}
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
"""The dtypes that artifacts use, by the names that safetensors gives them."""
_SHOWN = 4  # unknown tensors named in a message

Problem = tuple[str, int]
"""What is wrong, and a layer that has it."""


@dataclass(frozen=True)
class Layout:
    """The tensors of a file. Those whose names end in `optional` may be missing."""

    shapes: Shapes
    optional: str | None = None


def tensor_name(layer: int, kind: str, field: str) -> str:
    """The name of a tensor, such as `layers.0.key.clip`."""
    return f"{side_name(layer, kind)}.{field}"


def side_name(layer: int, side: str) -> str:
    """The prefix that all tensors of one side of a layer share."""
    return f"layers.{layer}.{side}"


def split_name(name: str) -> tuple[int, str, str]:
    """The inverse of `tensor_name`."""
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
    """The inverse of `rotation_tensors`. Raises `KeyError` for a missing matrix or clip ratio."""
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
    """The required tensors of `rotations.safetensors`. Imported files may lack eigenvalues."""
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
            if recipe.transform:
                fields |= {
                    "transform": (torch.float32, (layer.kv_heads, dim, dim)),
                    "deviations": (torch.float32, (layer.kv_heads, dim)),
                    "costs": (torch.float64, (layer.kv_heads, dim)),
                    "widths": (torch.int64, (layer.kv_heads, dim // SEGMENT)),
                }
            for field, shape in fields.items():
                shapes[tensor_name(layer.index, side, field)] = shape
    return Layout(shapes, ".eigenvalues" if imported else None)


def matrix_count(recipe: Recipe, kv_heads: int) -> int:
    """The number of matrices of one side of a layer."""
    return 1 if recipe.pooling == "layer" else kv_heads


def statistic_dims(layer: Layer, recipe: Recipe) -> dict[str, int]:
    """Kind -> dimension of each second moment that calibration keeps for a layer."""
    dims = layer.dims
    if recipe.value_statistic == "key_energy" and "value" in dims:
        dims["key_energy"] = layer.value_dim
    return dims


def statistics_tensors(averages: Averages) -> dict[str, torch.Tensor]:
    """The tensors of `statistics.safetensors` by name. With their counts, files can be merged."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, kinds in averages.items():
        for kind, average in kinds.items():
            for field in ("second_moment", "mean", "count"):
                if (tensor := getattr(average, field)) is not None:
                    tensors[_statistic_name(layer, kind, field)] = tensor
    return tensors


def statistics_from(tensors: Mapping[str, torch.Tensor]) -> Averages:
    """The inverse of `statistics_tensors`."""
    averages: Averages = {}
    for name, second_moment in tensors.items():
        layer, kind, field = split_name(name)
        if field not in ("second_moment", "key_energy_moment"):  # each average has one of them
            continue
        kind = "key_energy" if field == "key_energy_moment" else kind
        mean = tensors.get(_statistic_name(layer, kind, "mean"))
        count = tensors.get(_statistic_name(layer, kind, "count"))
        averages.setdefault(layer, {})[kind] = Average(second_moment, mean, count)
    return averages


def _statistic_name(layer: int, kind: str, field: str) -> str:
    # The key-energy moment is a weighted moment of values, and its weight is not a count.
    if kind == "key_energy" and field in _OF_KEY_ENERGY:
        return tensor_name(layer, "value", _OF_KEY_ENERGY[field])
    return tensor_name(layer, kind, field)


def statistics_layout(recipe: Recipe, geometry: Geometry) -> Layout:
    """The required tensors of `statistics.safetensors`."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        for kind, dim in statistic_dims(layer, recipe).items():
            fields: Shapes = {"second_moment": (torch.float64, (layer.kv_heads, dim, dim))}
            if kind == "key_energy":
                fields["count"] = torch.float64, (layer.kv_heads,)
            else:
                fields["mean"] = torch.float64, (layer.kv_heads, dim)
                fields["count"] = torch.int64, ()
            for field, shape in fields.items():
                shapes[_statistic_name(layer.index, kind, field)] = shape
        for side in layer.sides if recipe.transform else ():
            kind, dim = metric_kind(side), layer.dims[side]
            moment = torch.float64, (layer.kv_heads, dim, dim)
            shapes[tensor_name(layer.index, kind, "second_moment")] = moment
            shapes[tensor_name(layer.index, kind, "count")] = torch.int64, ()
    return Layout(shapes)


def read_tensors(path: Path, layout: Layout) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a safetensors file, and one sentence for each kind of problem.

    Names, dtypes and shapes are checked first, and no tensor is read if any is wrong. The file is
    opened once, so that the checked tensors are the ones that are read. Raises `RotationZooError`
    for a file that is not safetensors, and for dtypes that no artifact uses.
    """
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            slices = {name: file.get_slice(name) for name in names}
            shapes: Shapes = {
                name: (DTYPES[part.get_dtype()], tuple(part.get_shape()))
                for name, part in slices.items()
            }
            if problems := shape_problems(shapes, layout):
                return {}, problems
            tensors = {name: file.get_tensor(name) for name in names}
    except (KeyError, OSError, ValueError, SafetensorError) as error:
        reason = f"it has tensors of type {error}" if isinstance(error, KeyError) else error
        raise RotationZooError(f"{path} is damaged: {reason}", "fetch or make it again") from error
    return tensors, sentences(_value_problems(tensors))


def tensor_problems(tensors: Mapping[str, torch.Tensor], layout: Layout) -> list[str]:
    """One sentence for each kind of problem with tensors that have not been written yet."""
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return shape_problems(shapes, layout) or sentences(_value_problems(tensors))


def shape_problems(shapes: Shapes, layout: Layout) -> list[str]:
    """One sentence for each kind of missing, unknown or misshapen tensor."""
    found: list[Problem] = []
    for name, shape in layout.shapes.items():
        layer, _, words = _describe(name)
        if name in shapes:
            if shapes[name] != shape:
                found.append((f"{words} of another shape or type than the model's", layer))
        elif layout.optional is None or not name.endswith(layout.optional):
            found.append((f"{words} missing", layer))
    problems = sentences(found)
    if extra := sorted(shapes.keys() - layout.shapes.keys()):
        names = ", ".join(name[:80] for name in extra[:_SHOWN])
        problems.append(f"tensors that belong to no layer: {names}")
    return problems


def _value_problems(tensors: Mapping[str, torch.Tensor]) -> Iterator[Problem]:
    """Tensors that are not finite, means too large for the codec, and counts that are not positive.
    Names and shapes must be those of a layout."""
    for name, tensor in tensors.items():
        layer, field, words = _describe(name)
        if not torch.isfinite(tensor).all():
            yield f"{words} not finite", layer
        elif field == "mean" and tensor.abs().max() > LARGEST:
            yield f"{words} above {LARGEST:.0e}, the limit of the codec", layer
        elif field == "count" and tensor.item() <= 0:
            yield f"{words} not positive", layer


def orthogonality_problems(
    tensors: Mapping[str, torch.Tensor], imported: bool
) -> Iterator[Problem]:
    """Rotations that are not orthogonal. Names must be those of a layout."""
    for name, tensor in tensors.items():
        layer, field, words = _describe(name)
        if field == "rotation" and not is_orthogonal(tensor, imported):
            yield f"{words} not orthogonal", layer


def sentences(problems: Iterable[Problem]) -> list[str]:
    """Turns `("what", 0), ("what", 1)` into `["what: layers 0, 1"]`."""
    layers: dict[str, list[int]] = {}
    for what, layer in problems:
        layers.setdefault(what, []).append(layer)
    lines = []
    for what, indices in layers.items():
        noun = "layers" if len(indices) > 1 else "layer"
        lines.append(f"{what}: {noun} {', '.join(map(str, sorted(indices)))}")
    return lines


def _describe(name: str) -> tuple[int, str, str]:
    """The layer and the field of a tensor, and words such as `key second moment`."""
    layer, kind, field = split_name(name)
    return layer, field, f"{kind} {field.replace('_', ' ')}"
