"""A budget of bits an element: which layers' rows get more of them, so that a model loses least.

Layers differ far more in what their rounding costs than rotations do: in one trained model of eight
layers, two layers' keys cost 60 % of all that was lost. The choice is a knapsack problem with one
choice for each row, and scipy's integer program solves it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

STEP = 16
"""Channels of 64 that get a bit together: each number of them is a kernel of its own."""
PER_BIT = 0.25
"""What is left of a loss after one more bit a channel: the loss is quadratic in the errors, and
these halve."""
SMALLEST = 1e-3
"""The share of the mean loss that every place loses at least. In bfloat16, a loss may be too small
to be measured; bits that nobody needs more go there."""
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
        """The numbers of bits that a row may have more: one for each channel at most."""
        step = STEP * max(1, self.dim // 64)
        return np.arange(0, self.dim + 1, step)

    @property
    def losses(self) -> np.ndarray:
        """What is lost with each of them."""
        return self.loss * PER_BIT ** (self.choices / self.dim)


def choose_bits(places: Sequence[Place], extra: float) -> list[int]:
    """How many bits more each row of a place gets, where `extra` bits more an element are spent on
    average, or as many as they may get."""
    # Most commands that read rotations spend nothing, and need not wait for scipy.
    from scipy.optimize import Bounds, LinearConstraint, milp

    count = sum(len(place.choices) for place in places)
    least = SMALLEST * sum(place.loss for place in places) / len(places)
    known = [replace(place, loss=max(place.loss, least)) for place in places]
    losses = np.concatenate([place.losses for place in known])
    bits = np.concatenate([place.heads * place.choices for place in places])
    one_each = np.zeros((len(places), count))
    ends = np.cumsum([len(place.choices) for place in places])
    for row, place, end in zip(one_each, places, ends, strict=True):
        row[end - len(place.choices) : end] = 1
    budget = extra * sum(place.elements for place in places)
    solution = milp(
        # The solver's tolerances are absolute.
        losses / max(losses.sum(), np.finfo(float).tiny),
        integrality=np.ones(count),
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
