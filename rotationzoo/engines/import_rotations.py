"""Rotations of imported files, and the statistics recovered from them."""

import torch

from rotationzoo.engines.base import SideMatrices
from rotationzoo.engines.rotation_file import Pair
from rotationzoo.linalg import compositions
from rotationzoo.linalg.moments import Average, Averages
from rotationzoo.model.geometry import Geometry, Layer, cached_layers
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LayerRotations, Rotation, Rotations


def rotations_of_files(pair: Pair, recipe: Recipe, geometry: Geometry) -> Rotations:
    """The files' matrices, with the clip ratios of the recipe."""
    layers = {}
    for layer in cached_layers(geometry):
        key = _rotation(pair.key.content, layer, recipe.key_clip, recipe)
        value = _rotation(pair.value.content, layer, recipe.value_clip, recipe)
        layers[layer.index] = LayerRotations(key, value)
    return Rotations(layers)


def recover_statistics(rotations: Rotations, recipe: Recipe) -> Averages:
    """The second moments `Sigma = U diag(lambda) U^T`, float64 `[H or 1, D, D]`.

    They are recovered for every side that has eigenvalues and a known composition.
    """
    averages: Averages = {}
    if not recipe.has_eigenbasis:
        return averages
    names = {"key": recipe.key_statistic, "value": recipe.value_statistic}
    for layer, side, rotation in rotations.each():
        if rotation.eigenvalues is None:
            continue
        group = recipe.group(rotation.dim)
        basis = compositions.recover_basis(rotation.matrix, recipe.composition, group)
        moment = basis @ torch.diag_embed(rotation.eigenvalues.double()) @ basis.mT
        symmetric = (moment + moment.mT) / 2
        averages.setdefault(layer, {})[names[side]] = Average(symmetric)
    return averages


def _rotation(side: SideMatrices, layer: Layer, clip: float, recipe: Recipe) -> Rotation:
    """One side of one layer, copied.

    A file with one matrix for all layers may store it only once, and safetensors refuses tensors
    that share memory.
    """
    matrix = side.rotation[layer.index]
    eigenvalues, mean = side.eigenvalues.get(layer.index), side.mean.get(layer.index)
    dim = matrix.shape[-1]
    heads = layer.kv_heads if recipe.pooling == "head" else 1
    if eigenvalues is not None:
        eigenvalues = _copy(eigenvalues.expand(heads, dim))
    if mean is not None:
        mean = _copy(mean.float().expand(layer.kv_heads, dim))
    return Rotation(
        matrix=_copy(matrix.expand(heads, dim, dim)),
        clip=torch.full((layer.kv_heads,), clip, dtype=torch.float64),
        eigenvalues=eigenvalues,
        mean=mean,
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
