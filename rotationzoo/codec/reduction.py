"""Rotations as a cache takes them: which means they keep, and whether a budget of bits."""

from collections.abc import Collection
from dataclasses import asdict, replace

from rotationzoo.budget import Budget, EvenBudget
from rotationzoo.codec.engines import TURNED_MEAN
from rotationzoo.codec.formats import BUDGETED, SIMULATED
from rotationzoo.errors import UsageError
from rotationzoo.rotations import Rotation, Rotations


def reduce_rotations(
    rotations: Rotations,
    group_size: int | None,
    uncentered: Collection[str],
    budget: Budget | None = None,
) -> Rotations:
    """Rotations as an engine takes them: without the means of the sides `uncentered`, and with
    another budget where one is given. Raises as `codec.budget.spend_bits` does."""
    if budget and (rotations.has_budget or not isinstance(budget, EvenBudget)):
        # A server spends no bits where rotations keep their own budget.
        from rotationzoo.codec.budget import spend_bits

        rotations = spend_bits(rotations, budget, group_size)

    def reduce(_: int, side: str, rotation: Rotation) -> Rotation:
        mean = None if side in uncentered else rotation.mean
        rotation = replace(rotation, mean=mean)
        if mean is None or TURNED_MEAN in uncentered:
            rotation = replace(rotation, turned_mean=None, frequencies=None)
        return rotation

    return rotations.replace(reduce)


def check_budget(budget: Budget | None, has_budget: bool, format: str) -> None:
    """Raise `UsageError` for another budget where no rotations have one, and where rows of the
    `format` have no room for it."""
    if not budget:
        return
    if not has_budget:
        raise UsageError(
            "--bits is for rotations that have a budget of bits, and none have",
            hint="leave it out, or make some with: rotationzoo calibrate MODEL --bits 2.5",
        )
    if SIMULATED[format].offset != "none":
        raise UsageError(
            f"rows of the format {format} have the same bits in all layers",
            hint=f"leave out --bits, or add: --format {BUDGETED}",
        )


def budget_beside_others(budget: Budget | None, own: Budget, has_others: bool) -> Budget | None:
    """The budget, or rotations' `own`, in an engine that keeps layers with a sliding window exact,
    and states. Beside such layers all others get the same bits, because the engine pads the pages
    of all layers to the largest."""
    if not own or not has_others:
        return budget
    return EvenBudget(**asdict(budget or own))
