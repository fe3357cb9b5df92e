"""Turned means: what keys share before RoPE, at each position."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.linalg.moments import TURNED, Moment, Statistics
from rotationzoo.model.turning import Turning
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotation, Rotations

Means = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> `Rotation.turned_mean` and `Rotation.frequencies`."""


def turn_means(
    statistics: Statistics, geometry: Geometry, turnings: Mapping[int, Turning], recipe: Recipe
) -> tuple[Statistics, Means]:
    """The statistics with the moments of keys about their turned means in place of those before
    RoPE, and these means. They are 0 in a layer whose keys vary less about their mean alone.

    Keys before RoPE are taken to depend on no position, and rows to be of one length."""
    means: Means = {}
    start, stop = recipe.sink * recipe.exclude_sink, recipe.data.length
    found = {layer: dict(kinds) for layer, kinds in statistics.items()}
    for layer in cached_layers(geometry):
        if "key" not in layer.sides:
            continue
        kinds = found[layer.index]
        plain, before = _covariance(kinds["key"]), _covariance(kinds[TURNED])
        turned = torch.zeros(layer.kv_heads, 3, layer.key_dim, dtype=torch.float64)
        frequencies = torch.zeros(layer.key_dim, dtype=torch.float64)
        turning = turnings.get(layer.index)
        if turning is not None and _trace(before) < _trace(plain):
            mean = kinds[TURNED].mean.cpu()
            turned, frequencies = turning.amplitudes(mean, start, stop), turning.frequencies
            plain = turning.spread(before, start, stop)
        means[layer.index] = turned.float(), frequencies
        weight = kinds["key"].weight.cpu()
        nothing = torch.zeros_like(turned[:, 0])
        kinds[TURNED] = Moment(plain * weight[:, None, None], nothing, weight)
    return found, means


def add_turned_means(rotations: Rotations, means: Means) -> Rotations:
    """The rotations with turned means of keys."""

    def add_mean(layer: int, side: str, rotation: Rotation) -> Rotation:
        if side != "key" or layer not in means:
            return rotation
        turned, frequencies = means[layer]
        return replace(rotation, turned_mean=turned, frequencies=frequencies)

    return rotations.replace(add_mean)


def _covariance(moment: Moment) -> torch.Tensor:
    """`[H, D, D]`, on the CPU."""
    mean = moment.mean.cpu()
    return moment.second_moment.cpu() - mean[:, :, None] * mean[:, None]


def _trace(moment: torch.Tensor) -> float:
    return float(moment.diagonal(dim1=-2, dim2=-1).sum())
