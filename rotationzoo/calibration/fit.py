"""Second moments -> the rotations that a recipe asks for."""

import hashlib
from collections.abc import Sequence

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.linalg import compositions
from rotationzoo.linalg.moments import Statistics
from rotationzoo.model import centering
from rotationzoo.model.geometry import Geometry, Layer, cached_layers
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LayerRotations, Rotation, Rotations

EXACT = (
    1e-12  # orthogonality error allowed before the cast to float32; measured 3e-15 for D up to 512
)


def fit(statistics: Statistics | None, recipe: Recipe, geometry: Geometry) -> Rotations:
    """The rotations that a recipe makes of statistics; these may be None for a recipe that needs
    none.

    Raises `RotationZooError` if a rotation is not orthogonal to 1e-12 before it is cast to float32.
    """
    layers = {}
    for layer in cached_layers(geometry):
        key = _fit_side(statistics, recipe, layer, "key")
        value = _fit_side(statistics, recipe, layer, "value")
        layers[layer.index] = LayerRotations(key, value)
    return Rotations(layers)


def settle_centering(recipe: Recipe, layers: Sequence[int]) -> tuple[Recipe, list[str]]:
    """The recipe for a model in which a mean of keys moves the attention of these layers, and what
    to tell its user: one that searches leaves the keys their mean. Raises `RotationZooError` for
    another that centres them."""
    if not recipe.center_keys or not layers:
        return recipe, []
    if recipe.search is None:
        raise RotationZooError(
            f"keys of this model cannot be centred: {centering.reason(layers)}",
            hint="set center_keys to false in the recipe",
        )
    kept = recipe.model_copy(update={"center_keys": False})
    return kept, [
        f"keys keep their mean, although the recipe {recipe.name} centres them: {centering.reason(layers)}"
    ]


def check_recipe(recipe: Recipe, geometry: Geometry) -> None:
    """Raise `RotationZooError` if a head dimension has no such rotation: no Hadamard matrix, or
    groups that do not fit."""
    if recipe.composition == compositions.GIVEN:
        raise RotationZooError(
            "the composition 'given' stands for imported matrices and cannot be calibrated",
            hint="leave composition out of the recipe, or see docs/recipes.md for those that can",
        )
    for layer in cached_layers(geometry):
        for dim in {layer.key_dim, layer.value_dim}:
            if dim % recipe.group(dim):
                raise RotationZooError(
                    f"layer {layer.index}: quantization groups of {recipe.group(dim)} do not divide the head dimension {dim}",
                    hint=f"set group_size in the recipe to a divisor of {dim}, or to null for the whole head",
                )
            if recipe.has_eigenbasis:
                compositions.compose(
                    compositions.identity(dim), recipe.composition, recipe.group(dim)
                )
            else:
                compositions.data_free(dim, recipe.composition, seed=0)


def target_moment(statistics: Statistics, recipe: Recipe, layer: int, side: str) -> torch.Tensor:
    """The second moment `[H, D, D]` that a side's eigenbasis comes from; H = 1 when pooled over the
    layer's heads."""
    kind = recipe.key_statistic if side == "key" else recipe.value_statistic
    second = statistics[layer][kind].second_moment.cpu()
    return second.mean(0, keepdim=True) if recipe.pooling == "layer" else second


def _fit_side(statistics: Statistics | None, recipe: Recipe, layer: Layer, side: str) -> Rotation:
    """The rotation of one side of a layer, with its eigenvalues, clip ratios and mean."""
    eigenvalues, matrix = _compose_side(statistics, recipe, layer, side)
    error = compositions.orthogonality_error(matrix)
    if not error <= EXACT:
        raise RotationZooError(
            f"the {side} rotation of layer {layer.index} is off orthogonality by {error:.1e}"
        )
    ratio = {"key": recipe.key_clip, "value": recipe.value_clip}[side]
    mean = None
    if side in recipe.centered:
        assert statistics is not None
        mean = statistics[layer.index][side].mean.float().cpu().contiguous()
    clip = torch.full((layer.kv_heads,), ratio, dtype=torch.float64)
    return Rotation(matrix.float().contiguous(), clip, eigenvalues.float().contiguous(), mean)


def _compose_side(
    statistics: Statistics | None, recipe: Recipe, layer: Layer, side: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues `[H, D]` and rotations `[H, D, D]`, float64."""
    dim = layer.key_dim if side == "key" else layer.value_dim
    if recipe.has_eigenbasis:
        if statistics is None:
            raise RotationZooError(f"the composition {recipe.composition} needs statistics")
        eigenvalues, basis = compositions.eigenbasis(
            target_moment(statistics, recipe, layer.index, side)
        )
        return eigenvalues, compositions.compose(basis, recipe.composition, recipe.group(dim))
    heads = range(1 if recipe.pooling == "layer" else layer.kv_heads)
    seeds = [_seed(recipe.seed, layer.index, side, head) for head in heads]
    matrices = torch.stack(
        [compositions.data_free(dim, recipe.composition, seed) for seed in seeds]
    )
    return torch.ones(matrices.shape[:2], dtype=torch.float64), matrices


def _seed(*parts: int | str) -> int:
    """An independent seed for each layer, side and head."""
    return int.from_bytes(hashlib.sha256(".".join(map(str, parts)).encode()).digest()[:7], "little")
