"""A budget of bits, spent on the layers and sides whose rounding costs most.

Layers differ far more in what their rounding costs than rotations do: in one trained model of eight
layers, two layers' keys cost 60 % of all that was lost. The choice is a knapsack problem with one
choice for each row, and scipy's integer program solves it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rotationzoo.budget import Budget, EvenBudget
from rotationzoo.codec import int2
from rotationzoo.codec.formats import BITS, FINE, Format
from rotationzoo.codec.transform import SegmentLayout
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.linalg.transform_coding import MOST_BITS, share_bits
from rotationzoo.rotations import Rotation, Rotations

COARSE = replace(FINE, fine_channels=0)
"""Codes of 2 bits with a scale: what a budget starts from."""
STEP = 16
"""Channels of 64 that get a bit together: each number of them is a kernel of its own."""
WIDEST = 128
"""Channels of a row that may have 8 bits each: where keys and values both have more, the decode
kernel has no shared memory for their tiles."""
PER_BIT = 0.25
"""What is left of a loss after one more bit a channel: the loss is quadratic in the errors, and
these halve."""
SMALLEST = 1e-3
"""The share of the mean loss that every place loses at least. In bfloat16, a loss may be too small
to be measured; bits that are left go there."""
_NOTHING = 1e-9  # bits that are no more than rounding of the average
_GAP = 1e-5  # a solution this close to the best one, relative to its loss, is as good


@dataclass(frozen=True)
class Place:
    """One side of one layer."""

    loss: float
    """What is lost without any bit more, in nats a token."""
    heads: int
    dim: int

    @property
    def elements(self) -> int:
        """Elements of a token."""
        return self.heads * self.dim

    @property
    def choices(self) -> np.ndarray:
        """The numbers of bits that a row may have more than 2 for each channel: one for no, some or
        all channels, or two or, up to `WIDEST` channels, six for all."""
        step = STEP * max(1, self.dim // 64)
        whole = (2, 6) if self.dim <= WIDEST else (2,)
        return np.array([*range(0, self.dim + 1, step), *(bits * self.dim for bits in whole)])


def spend_bits(rotations: Rotations, budget: Budget, group_size: int | None) -> Rotations:
    """The rotations with the bits of each layer and side that a budget buys, by their
    sensitivities, where this many channels share a scale; unchanged by an empty budget. No model is
    needed.

    Raises `RotationZooError` for rotations without sensitivities, and as `check_room` does.
    """
    if not budget:
        return rotations
    if rotations.has_transform:
        return _spend_on_channels(rotations, budget)
    chosen: dict[tuple[int, str], int] = {}
    for sides, bits in budget.shares:
        spots = [(layer, side) for layer, side, _ in rotations.each() if side in sides]
        places = [_place(rotations[layer][side]) for layer, side in spots]
        extra = _extra_bits(places, bits, group_size)
        kinds: Sequence[Any] = range(len(places))
        if isinstance(budget, EvenBudget):
            kinds = [(side, place.dim) for (_, side), place in zip(spots, places, strict=True)]
        chosen |= zip(spots, _choose_by_kind(kinds, places, extra), strict=True)

    def give_bits(layer: int, side: str, rotation: Rotation) -> Rotation:
        return replace(rotation, fine_channels=torch.tensor(chosen[layer, side]))

    return rotations.replace(give_bits)


def _spend_on_channels(rotations: Rotations, budget: Budget) -> Rotations:
    """The rotations with the bits of each channel of transform coding."""
    chosen: dict[tuple[int, str], torch.Tensor] = {}
    for sides, bits in budget.shares:
        costs: dict[tuple[int, str], torch.Tensor] = {}
        for layer, side, rotation in rotations.each():
            if side in sides:
                assert rotation.costs is not None
                costs[layer, side] = rotation.costs
        # Alone, each side of a layer gets all bits of its own.
        together = [[*costs]]
        if isinstance(budget, EvenBudget):
            together = [[place] for place in costs]
        for places in together:
            shares = share_bits([costs[place] for place in places], bits)
            chosen |= zip(places, shares, strict=True)

    def give_bits(layer: int, side: str, rotation: Rotation) -> Rotation:
        return replace(rotation, widths=chosen[layer, side])

    return rotations.replace(give_bits)


def _choose_by_kind(kinds: Sequence[Any], places: Sequence[Place], extra: float) -> list[int]:
    """What `choose_bits` gives to each place, where places of a kind get the same."""
    merged = []
    for kind in dict.fromkeys(kinds):
        mine = [place for place, its in zip(places, kinds, strict=True) if its == kind]
        loss = sum(place.loss for place in mine)
        heads = sum(place.heads for place in mine)
        merged.append(Place(loss, heads, mine[0].dim))
    bits = dict(zip(dict.fromkeys(kinds), choose_bits(merged, extra), strict=True))
    return [bits[kind] for kind in kinds]


def format_of_equal_bits(rotations: Rotations, format: Format) -> Format:
    """The format of 2 bits with as many more as let rows of equal bits take the bytes of these
    rotations' budget: whole bits, and one more for a multiple of 8 channels, rounded up."""
    each = [rotation for _, _, rotation in rotations.each()]
    rows = sum(len(rotation.clip) for rotation in each)
    elements = sum(len(rotation.clip) * rotation.dim for rotation in each)
    whole, left = divmod(max(0, _more_bits(each)), elements)
    eighths = min(-(-left // (8 * rows)), min(rotation.dim for rotation in each) // 8)
    bits = min(each for each in BITS if each >= 2 + whole)
    return replace(format, bits=bits, fine_channels=8 * eighths * (bits == 2 + whole))


def _more_bits(rotations: Sequence[Rotation]) -> int:
    """The bits of a token in all KV heads beyond 2 for each channel, and a scale."""
    total = 0
    for rotation in rotations:
        heads = len(rotation.clip)
        if rotation.widths is None:
            total += heads * int(rotation.fine_channels or 0)
        else:
            stored = 8 * sum(SegmentLayout.of(rotation.widths).row_bytes)
            total += stored - heads * (2 * rotation.dim + COARSE.metadata_bits)
    return total


def _place(rotation: Rotation) -> Place:
    if rotation.sensitivity is None:
        problem = "these rotations do not know what each layer loses, so no bits can be shared out"
        hint = "calibrate with --bits"
        raise RotationZooError(problem, hint)
    return Place(float(rotation.sensitivity), len(rotation.clip), rotation.dim)


def check_room(
    budget: Budget, group_size: int | None, geometry: Geometry, transform: bool = False
) -> None:
    """Raise `RotationZooError` for a budget that leaves nothing to latents or, without transform
    coding, that is below the bits of codes of 2 bits and their scales. A geometry that only the
    weights will show, which is empty, has none to check."""
    for sides, bits in budget.shares if geometry else []:
        places = []
        for layer in cached_layers(geometry):
            mine = [side for side in layer.sides if side in sides]
            places += [Place(0, layer.kv_heads, layer.dims[side]) for side in mine]
        if not (transform and places):
            _extra_bits(places, bits, group_size)


def has_room(budget: Budget, group_size: int | None, geometry: Geometry) -> bool:
    """Whether `check_room` finds nothing wrong."""
    with suppress(RotationZooError):
        check_room(budget, group_size, geometry)
        return True
    return False


def _extra_bits(places: Sequence[Place], bits: float, group_size: int | None) -> float:
    """Bits an element that a budget leaves beyond codes of 2 bits and their scales."""
    if not places:
        hint = "give --bits alone"
        raise RotationZooError("a budget for keys and one for values leave none for latents", hint)
    taken = 0.0
    for place in places:
        taken += place.elements * int2.bits_per_element(place.dim, group_size, COARSE)
    least = taken / sum(place.elements for place in places)
    if bits < least - _NOTHING:
        raised = math.ceil((least - _NOTHING) * 1000) / 1000  # 2 + 16/192 may not be rounded down
        problem = f"a budget of {bits:g} bits is less than codes of 2 bits take with their scales"
        raise RotationZooError(
            f"{problem}, {raised:g}", f"give {raised:g} or more, or --recipe transform"
        )
    return max(0.0, bits - least)


def budget_problems(
    rotations: Rotations, budget: Budget, group_size: int | None
) -> Iterator[tuple[str, int]]:
    """Problems of layers: negative sensitivities, and bits that do not fit into rows or that exceed
    the budget. The tensors must be finite and have the shapes that the recipe asks for."""
    if not budget:
        return
    if rotations.has_transform:
        yield from _width_problems(rotations, budget)
        return
    for layer, side, rotation in rotations.each():
        place = _place(rotation)
        if place.loss < 0:
            yield f"{side} sensitivity below 0", layer
        if rotation.fine_channels not in place.choices:
            yield f"{side} fine channels that rows have no room for", layer
    for sides, bits in budget.shares:
        mine = [each for each in rotations.each() if each[1] in sides]
        places = [_place(rotation) for _, _, rotation in mine]
        room = _extra_bits(places, bits, group_size) * sum(place.elements for place in places)
        spent = _more_bits([rotation for *_, rotation in mine])
        if spent > room + 1:  # the room is rounded, and bits are spent in steps of more than one
            yield f"more fine channels than {bits:g} bits buy", mine[0][0]


def _width_problems(rotations: Rotations, budget: Budget) -> Iterator[tuple[str, int]]:
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


def choose_bits(places: Sequence[Place], extra: float) -> list[int]:
    """The extra bits that each row of a place gets, where on average `extra` more bits per element
    are spent, or the most that rows may get."""
    # Most commands that read rotations spend nothing, and need not wait for scipy.
    from scipy.linalg import block_diag
    from scipy.optimize import Bounds, LinearConstraint, milp

    least = SMALLEST * sum(place.loss for place in places) / len(places)
    left = [max(place.loss, least) * PER_BIT ** (place.choices / place.dim) for place in places]
    losses = np.concatenate(left)
    bits = np.concatenate([place.heads * place.choices for place in places])
    one_each = block_diag(*(np.ones(len(place.choices)) for place in places))
    ends = np.cumsum([len(place.choices) for place in places])
    budget = extra * sum(place.elements for place in places)
    solution = milp(
        # The solver's tolerances are absolute.
        losses / max(losses.sum(), np.finfo(float).tiny),
        integrality=np.ones(len(losses)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(bits[None], -np.inf, budget),
        ],
        options={"mip_rel_gap": _GAP},
    )
    assert solution.success, solution.message  # no bits for anybody is always a solution
    chosen = np.split(solution.x, ends[:-1])
    pairs = zip(places, chosen, strict=True)
    return [int(place.choices[taken.argmax()]) for place, taken in pairs]
