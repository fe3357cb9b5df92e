"""The tensors in the files of an artifact: their names, which only this module knows, their shapes
and their types."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rotationzoo.artifact.manifest import ROTATIONS
from rotationzoo.codec.int2 import LARGEST
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import Average, Averages
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import SIDES, LayerRotations, Rotation, Rotations

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


def matrix_name(layer: int, side: str) -> str:
    """What the rotation of one side of a layer is called."""
    return f"layers.{layer}.{side}.rotation"


def rotation_tensors(rotations: Rotations) -> dict[str, torch.Tensor]:
    """What `rotations.safetensors` holds."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, side, rotation in rotations.each():
        tensors[matrix_name(layer, side)] = rotation.matrix
        tensors[f"layers.{layer}.{side}.clip"] = rotation.clip
        if rotation.eigenvalues is not None:
            tensors[f"layers.{layer}.{side}.eigenvalues"] = rotation.eigenvalues
        if rotation.mean is not None:
            tensors[f"layers.{layer}.{side}.mean"] = rotation.mean
    return tensors


def rotations_from(tensors: Mapping[str, torch.Tensor]) -> Rotations:
    """Inverse of `rotation_tensors`. Raises `KeyError` for a layer without one of its matrices or
    clip ratios."""
    layers = sorted({_layer(name) for name in tensors})
    sides = {
        (layer, side): _rotation_from(tensors, f"layers.{layer}.{side}")
        for layer in layers
        for side in SIDES
    }
    return Rotations(
        {layer: LayerRotations(sides[layer, "key"], sides[layer, "value"]) for layer in layers}
    )


def _rotation_from(tensors: Mapping[str, torch.Tensor], name: str) -> Rotation:
    return Rotation(
        tensors[f"{name}.rotation"],
        tensors[f"{name}.clip"],
        tensors.get(f"{name}.eigenvalues"),
        tensors.get(f"{name}.mean"),
    )


def statistics_tensors(averages: Averages) -> dict[str, torch.Tensor]:
    """What `statistics.safetensors` holds: means with their counts, so that files merge by
    count."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, kinds in averages.items():
        for kind, average in kinds.items():
            tensors[_moment_name(layer, kind)] = average.second_moment
            if average.mean is not None:
                tensors[f"layers.{layer}.{kind}.mean"] = average.mean
            if average.count is not None:
                tensors[_count_name(layer, kind)] = average.count
    return tensors


def statistics_from(tensors: Mapping[str, torch.Tensor]) -> Averages:
    """Inverse of `statistics_tensors`."""
    averages: Averages = {}
    for name, second_moment in tensors.items():
        _, layer, kind, field = name.split(".")
        if field not in ("second_moment", "key_energy_moment"):
            continue
        kind = "key_energy" if field == "key_energy_moment" else kind
        mean = tensors.get(f"layers.{layer}.{kind}.mean")
        count = tensors.get(_count_name(int(layer), kind))
        averages.setdefault(int(layer), {})[kind] = Average(second_moment, mean, count)
    return averages


def _moment_name(layer: int, kind: str) -> str:
    return f"layers.{layer}." + (
        "value.key_energy_moment" if kind == "key_energy" else f"{kind}.second_moment"
    )


def _count_name(layer: int, kind: str) -> str:
    return f"layers.{layer}." + ("value.key_energy" if kind == "key_energy" else f"{kind}.count")


def rotation_shapes(recipe: Recipe, geometry: Geometry) -> Shapes:
    """Name -> type and shape of every tensor in `rotations.safetensors`."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        for side, dim in zip(SIDES, (layer.key_dim, layer.value_dim), strict=True):
            heads = 1 if recipe.pooling == "layer" else layer.kv_heads
            name = f"layers.{layer.index}.{side}"
            shapes[f"{name}.rotation"] = torch.float32, (heads, dim, dim)
            shapes[f"{name}.eigenvalues"] = torch.float32, (heads, dim)
            shapes[f"{name}.clip"] = torch.float64, (layer.kv_heads,)
            if side in recipe.centered:
                shapes[f"{name}.mean"] = torch.float32, (layer.kv_heads, dim)
    return shapes


def statistics_shapes(recipe: Recipe, geometry: Geometry) -> Shapes:
    """The same of `statistics.safetensors`."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        dims = {
            "query": layer.key_dim,
            "key": layer.key_dim,
            "output": layer.value_dim,
            "value": layer.value_dim,
        }
        for kind, dim in dims.items():
            name = f"layers.{layer.index}.{kind}"
            shapes[f"{name}.second_moment"] = torch.float64, (layer.kv_heads, dim, dim)
            shapes[f"{name}.mean"] = torch.float64, (layer.kv_heads, dim)
            shapes[f"{name}.count"] = torch.int64, ()
        if recipe.value_statistic == "key_energy":
            name = f"layers.{layer.index}.value"
            shapes[f"{name}.key_energy_moment"] = (
                torch.float64,
                (layer.kv_heads, layer.value_dim, layer.value_dim),
            )
            shapes[f"{name}.key_energy"] = torch.float64, (layer.kv_heads,)
    return shapes


def recovered_shapes(recipe: Recipe, geometry: Geometry) -> Shapes:
    """What eigenvalues and rotations of a foreign file tell of its statistics."""
    shapes: Shapes = {}
    for layer in cached_layers(geometry):
        heads = 1 if recipe.pooling == "layer" else layer.kv_heads
        for kind, dim in (
            (recipe.key_statistic, layer.key_dim),
            (recipe.value_statistic, layer.value_dim),
        ):
            shapes[_moment_name(layer.index, kind)] = torch.float64, (heads, dim, dim)
    return shapes


def expected(
    file: str, recipe: Recipe, geometry: Geometry, imported: bool
) -> tuple[Shapes, str | None]:
    """What a file of an artifact holds, and the end of the names that may be missing: a foreign
    file may lack eigenvalues, and what is then known of its statistics is nothing."""
    if file == ROTATIONS:
        return rotation_shapes(recipe, geometry), ".eigenvalues" if imported else None
    shapes = recovered_shapes if imported else statistics_shapes
    return shapes(recipe, geometry), "_moment" if imported else None


def problems(
    file: str,
    tensors: Mapping[str, torch.Tensor],
    recipe: Recipe,
    geometry: Geometry,
    imported: bool,
) -> list[str]:
    """A sentence for all that is wrong with the tensors of a file of an artifact."""
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return shape_problems(shapes, *expected(file, recipe, geometry, imported)) or value_problems(
        tensors
    )


def header(path: Path) -> Shapes:
    """Type and shape of every tensor of a safetensors file, of which no tensor is read. That shape
    times type is the size of its data, and lies within the file, safetensors has checked. Raises
    `RotationZooError` for what is no such file, and for types that no artifact has."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
            return {
                name: (_DTYPES[part.get_dtype()], tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except KeyError as error:
        raise RotationZooError(
            f"{path} is damaged: it has tensors of type {error}", hint="fetch or make it again"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise RotationZooError(
            f"{path} is damaged: {error}", hint="fetch or make it again"
        ) from error


def shape_problems(shapes: Shapes, expected: Shapes, optional: str | None = None) -> list[str]:
    """Missing, misshapen and superfluous tensors, one sentence for each kind of trouble; names that
    end in `optional` may be missing."""
    layers: dict[str, list[int]] = defaultdict(list)
    for name, shape in expected.items():
        if name not in shapes and not (optional and name.endswith(optional)):
            layers[f"{_words(name)} missing"].append(_layer(name))
        elif name in shapes and shapes[name] != shape:
            layers[f"{_words(name)} of another shape or type than the model's"].append(_layer(name))
    found = sentences(layers)
    if extra := sorted(shapes.keys() - expected.keys()):
        names = ", ".join(name[:80] for name in extra[:4])
        found.append(f"tensors that belong to no layer: {names}")
    return found


def value_problems(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Tensors that are not finite, means that the codec does not take, and counts of nothing; of
    names that are `expected`."""
    layers: dict[str, list[int]] = defaultdict(list)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            layers[f"{_words(name)} not finite"].append(_layer(name))
        elif name.endswith(".mean") and tensor.abs().max() > LARGEST:
            layers[f"{_words(name)} beyond {LARGEST:.0e}, the most that the codec takes"].append(
                _layer(name)
            )
        elif name.endswith(".count") and tensor.item() <= 0:
            layers[f"{_words(name)} not positive"].append(_layer(name))
    return sentences(layers)


def sentences(layers: Mapping[str, list[int]]) -> list[str]:
    """`{"what": [0, 1]}` as `["what: layers 0, 1"]`."""
    return [
        f"{what}: layer{'s' * (len(n) > 1)} {', '.join(map(str, sorted(n)))}"
        for what, n in layers.items()
    ]


def _words(name: str) -> str:
    _, _, side, kind = name.split(".")
    return f"{side} {kind.replace('_', ' ')}"


def _layer(name: str) -> int:
    return int(name.split(".")[1])
