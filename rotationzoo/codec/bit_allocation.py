"""A budget of bits, spent on the channels whose errors cost most."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from rotationzoo.budget import Budget, EvenBudget
from rotationzoo.codec.transform import SegmentLayout
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.linalg.transform_coding import MOST_BITS, share_bits
from rotationzoo.rotations import Rotation, Rotations


def spend_bits(rotations: Rotations, budget: Budget) -> Rotations:
    """The rotations with the bits that a budget gives each channel, by their costs; unchanged by an
    empty budget. Raises `RotationZooError` for rotations without costs."""
    if not budget:
        return rotations
    if not rotations.has_transform:
        problem = "these rotations lack the costs of channels, so no bits can be shared out"
        raise RotationZooError(problem, "calibrate with --recipe transform")
    chosen: dict[tuple[int, str], torch.Tensor] = {}
    for sides, bits in budget.shares:
        costs: dict[tuple[int, str], torch.Tensor] = {}
        for layer, side, rotation in rotations.each():
            if side in sides:
                assert rotation.costs is not None
                costs[layer, side] = rotation.costs
        groups = [[*costs]]
        if isinstance(budget, EvenBudget):
            groups = [[place] for place in costs]
        for places in groups:
            shares = share_bits([costs[place] for place in places], bits)
            chosen |= zip(places, shares, strict=True)

    def give_bits(layer: int, side: str, rotation: Rotation) -> Rotation:
        return replace(rotation, widths=chosen[layer, side])

    return rotations.replace(give_bits)


def check_room(budget: Budget, geometry: Geometry) -> None:
    """Raise `RotationZooError` for a budget that leaves nothing to latents, but not for an empty
    geometry, which only the weights will show."""
    stored = {side for layer in cached_layers(geometry) for side in layer.sides}
    for sides, _ in budget.shares:
        if stored and stored.isdisjoint(sides):
            problem = "budgets for keys and for values leave no bits for latents"
            raise RotationZooError(problem, "give --bits alone")


def budget_problems(rotations: Rotations, budget: Budget) -> Iterator[tuple[str, int]]:
    """Yield problems with their layers: negative costs, and widths that are invalid or exceed the
    budget. The tensors must be finite and have the recipe's shapes."""
    if not budget:
        return
    for layer, side, rotation in rotations.each():
        widths, costs = rotation.widths, rotation.costs
        assert widths is not None
        assert costs is not None
        if (widths < 0).any() or (widths > MOST_BITS).any() or (widths.diff() > 0).any():
            yield f"{side} widths not descending, from {MOST_BITS} bits to 0", layer
            return
        if (costs < 0).any():
            yield f"{side} costs below 0", layer
    for sides, bits in budget.shares:
        taken, layers = 0.0, []
        for layer, side, rotation in rotations.each():
            if side in sides:
                assert rotation.widths is not None
                stored = 8 * sum(SegmentLayout.of(rotation.widths).row_bytes)
                taken += stored - bits * len(rotation.clip) * rotation.dim
                layers.append(layer)
        if taken > 0:
            yield f"wider channels than {bits:g} bits buy", layers[0]
