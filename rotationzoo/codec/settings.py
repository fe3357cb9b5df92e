"""The settings of a cache that stores codes, and rotations as an engine takes them."""

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
    """How a cache stores its tokens. Raises `RotationZooError` for nearest codes in `segments`."""

    codec: RotatedCodec
    layout: CacheLayout = field(default_factory=CacheLayout)
    slack: int = 64
    """Further tokens that stay exact while candidates may be taken back (assisted decoding)."""
    block: int = 256
    """Tokens per block."""
    reading: Reading = "auto"
    """What a decoding step of a layer with full attention reads."""

    def __post_init__(self) -> None:
        if self.codec.rounding == "nearest":
            check_nearest(self.layout.format)

    def page_layout(self, layer: int, side: str) -> PageLayout | SegmentLayout:
        return self.codec.page_layout(layer, side, self.block, self.layout.format)

    def for_layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> "CacheSettings":
        """The same with the rotations of one layer, as `RotatedCodec.for_layer` has them."""
        return replace(self, codec=self.codec.for_layer(index, key, value))

    def __deepcopy__(self, memo: object) -> "CacheSettings":
        return self  # copies of a cache share its rotations


def complete_settings(recipe: Recipe, rotations: Rotations, options: CacheOptions) -> CacheSettings:
    """The settings of a cache with these options. The engine and then the recipe decide what they
    leave open. Raises `UsageError` as `CacheOptions.as_engine` does."""
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


def reduce_rotations(
    rotations: Rotations, uncentered: Collection[str], budget: Budget | None = None
) -> Rotations:
    """Rotations as an engine takes them: without the means of the sides `uncentered`, and with
    another budget if one is given. Raises as `codec.bit_allocation.spend_bits` does."""
    if budget and (rotations.has_budget or not isinstance(budget, EvenBudget)):
        # Imported here because a server rarely needs it.
        from rotationzoo.codec.bit_allocation import spend_bits

        rotations = spend_bits(rotations, budget)

    def reduce(_: int, side: str, rotation: Rotation) -> Rotation:
        return replace(rotation, mean=None) if side in uncentered else rotation

    return rotations.replace(reduce)


def budget_beside_others(budget: Budget | None, own: Budget, has_others: bool) -> Budget | None:
    """The budget, or the rotations' `own`, in an engine that keeps sliding windows and states
    exact. If there are any, all other layers get equal bits, because the engine pads pages to the
    largest."""
    if not own or not has_others:
        return budget
    return EvenBudget(**asdict(budget or own))
