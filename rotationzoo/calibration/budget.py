"""A recipe's budget of bits, spent on the layers and sides whose rounding costs most."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from rotationzoo.artifact.tensor_check import Problem
from rotationzoo.codec import int2
from rotationzoo.codec.formats import FINE
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.bit_budget import Place, choose_bits
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LATENT, SIDES, Rotation, Rotations

COARSE = replace(FINE, fine_channels=0)
"""Codes of 2 bits with a scale: what a budget starts from."""


def spend_bits(rotations: Rotations, recipe: Recipe) -> Rotations:
    """The rotations with the bits of each layer and side that the recipe's budget buys, by their
    sensitivities; unchanged for a recipe without a budget. No model is needed.

    Raises `RotationZooError` for rotations without sensitivities, and as `check_budget` does.
    """
    if not recipe.has_budget:
        return rotations
    chosen: dict[tuple[int, str], int] = {}
    for sides, bits in _budgets(recipe):
        spots = [(layer, side) for layer, side, _ in rotations.each() if side in sides]
        places = [_place(rotations[layer][side]) for layer, side in spots]
        extra = _extra_bits(places, bits, recipe)
        chosen |= zip(spots, choose_bits(places, extra), strict=True)

    def give_bits(layer: int, side: str, rotation: Rotation) -> Rotation:
        return replace(rotation, fine_channels=torch.tensor(chosen[layer, side]))

    return rotations.replace(give_bits)


def average_fine_channels(rotations: Rotations) -> int:
    """The `Format.fine_channels` with which rows of equal bits take the bytes of these rotations'
    budget, rounded up to a multiple of 8."""
    bits, rows = 0, 0
    for _, _, rotation in rotations.each():
        heads = len(rotation.clip)
        bits += heads * int(rotation.fine_channels or 0)
        rows += heads
    return -(-bits // (8 * rows)) * 8


def _place(rotation: Rotation) -> Place:
    if rotation.sensitivity is None:
        raise RotationZooError(
            "these rotations do not know what each layer loses, so no bits can be shared out",
            hint="calibrate with --bits",
        )
    return Place(float(rotation.sensitivity), len(rotation.clip), rotation.dim)


def check_budget(recipe: Recipe, geometry: Geometry) -> None:
    """Raise `RotationZooError` for a budget below the bits of codes of 2 bits and their scales."""
    for sides, bits in _budgets(recipe):
        places = []
        for layer in cached_layers(geometry):
            mine = [side for side in layer.sides if side in sides]
            places += [Place(0, layer.kv_heads, layer.dims[side]) for side in mine]
        _extra_bits(places, bits, recipe)


def _budgets(recipe: Recipe) -> list[tuple[Sequence[str], float]]:
    """The budgets of a recipe: the sides that share one, and its bits an element."""
    every = *SIDES, LATENT
    budgets = [(every, recipe.bits), (["key"], recipe.key_bits), (["value"], recipe.value_bits)]
    return [(sides, bits) for sides, bits in budgets if bits is not None]


def _extra_bits(places: Sequence[Place], bits: float, recipe: Recipe) -> float:
    """Bits an element that a budget leaves beyond codes of 2 bits and their scales."""
    if not places:
        raise RotationZooError(
            "a budget for keys and one for values leave none for latents", hint="give --bits alone"
        )
    taken = 0.0
    for place in places:
        taken += place.elements * int2.bits_per_element(place.dim, recipe.group_size, COARSE)
    least = taken / sum(place.elements for place in places)
    if bits < least:
        raise RotationZooError(
            f"a budget of {bits:g} bits is less than codes of 2 bits take with their scales, "
            f"{least:g}",
            hint=f"--bits {least:g} or more",
        )
    return bits - least


def budget_problems(rotations: Rotations, recipe: Recipe) -> Iterator[Problem]:
    """Sensitivities that are no losses, and bits that rows have no room for. The tensors must have
    the shapes that the recipe asks for, and be finite."""
    if not recipe.has_budget:
        return
    for layer, side, rotation in rotations.each():
        place = _place(rotation)
        if place.loss < 0:
            yield f"{side} sensitivity below 0", layer
        if rotation.fine_channels not in place.choices:
            yield f"{side} fine channels that rows have no room for", layer
