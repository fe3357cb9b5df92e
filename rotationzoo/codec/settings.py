"""The settings of a cache that stores codes, the same for all its layers, and what it takes of
rotations: which means, and whether a budget of bits."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace

import torch

from rotationzoo.budget import Budget, EvenBudget
from rotationzoo.codec.formats import BUDGETED, SIMULATED
from rotationzoo.codec.int2 import check_nearest
from rotationzoo.codec.options import CacheOptions, Reading, Rounding
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.transform import SegmentLayout
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotation, Rotations


@dataclass(frozen=True)
class CacheSettings:
    """How the layers of a cache store their tokens. Raises `RotationZooError` for a format with
    codes of more than 2 bits, which only a simulation reads, and for nearest codes in `segments`.
    """

    codec: RotatedCodec
    layout: CacheLayout = field(default_factory=CacheLayout)
    """The sizes of the exact windows, the format, and what a chunk reads of earlier ones."""
    slack: int = 64
    """How many tokens more stay exact while candidates may be taken back (assisted decoding)."""
    block: int = 256
    """Tokens per block."""
    reading: Reading = "auto"
    """The form in which a decoding step of a layer with full attention reads."""

    def __post_init__(self) -> None:
        if self.codec.rounding == "nearest":
            check_nearest(self.layout.format)

    def page_layout(self, layer: int, side: str) -> PageLayout | SegmentLayout:
        """How a page holds the codes of a side."""
        return self.codec.page_layout(layer, side, self.block, self.layout.format)

    def for_layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> "CacheSettings":
        """The same with the rotations of one layer alone, on the device of its keys and values
        `[B, H, T, D]`. Raises `RotationZooError` where they are for other heads or dimensions."""
        return replace(self, codec=self.codec.for_layer(index, key, value))

    def __deepcopy__(self, memo: object) -> "CacheSettings":
        return self  # copies of a cache share its rotations


def complete_settings(recipe: Recipe, rotations: Rotations, options: CacheOptions) -> CacheSettings:
    """The settings of a cache with these options, and otherwise as its engine has them, or else as
    the recipe says. Raises `UsageError` as `CacheOptions.as_engine` does."""
    known = options.as_engine(rotations.has_budget)
    assert known.format is not None
    assert known.prefill_layout is not None
    rounding: Rounding = "transform" if known.format == BUDGETED else "nearest"
    group_size = known.group_size or recipe.group_size
    sink, recent = known.windows(recipe)
    layout = CacheLayout(
        SIMULATED[known.format],
        sink,
        recent,
        prefill_layout=known.prefill_layout,
        group_size=group_size,
    )
    codec = RotatedCodec(rotations, group_size, rounding)
    return CacheSettings(codec, layout, known.slack, reading=known.reading)


# ---- rotations as a cache takes them


def reduce_rotations(
    rotations: Rotations,
    uncentered: Collection[str],
    budget: Budget | None = None,
) -> Rotations:
    """Rotations as an engine takes them: without the means of the sides `uncentered`, and with
    another budget where one is given. Raises as `codec.bit_allocation.spend_bits` does."""
    if budget and (rotations.has_budget or not isinstance(budget, EvenBudget)):
        # A server spends no bits where rotations keep their own budget.
        from rotationzoo.codec.bit_allocation import spend_bits

        rotations = spend_bits(rotations, budget)

    def reduce(_: int, side: str, rotation: Rotation) -> Rotation:
        return replace(rotation, mean=None) if side in uncentered else rotation

    return rotations.replace(reduce)


def budget_beside_others(budget: Budget | None, own: Budget, has_others: bool) -> Budget | None:
    """The budget, or rotations' `own`, in an engine that keeps layers with a sliding window exact,
    and states. Beside such layers all others get the same bits, because the engine pads the pages
    of all layers to the largest."""
    if not own or not has_others:
        return budget
    return EvenBudget(**asdict(budget or own))
