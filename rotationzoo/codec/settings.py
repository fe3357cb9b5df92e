"""The settings of a cache that stores codes, the same for all its layers, the options that make
them, and what the cache takes of rotations: which means, and whether a budget of bits."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypedDict

import torch

from rotationzoo.budget import Budget, EvenBudget
from rotationzoo.codec.engine_needs import DEFAULT, choose_format, find_engine
from rotationzoo.codec.formats import BUDGETED, SIMULATED
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import Rotation, Rotations

Rounding = Literal["nearest", "feedback"]
Layout = Literal["server", "window"]
Reading = Literal["auto", "rows", "pages"]
"""Restored `rows`, or the `pages` themselves. `auto` reads pages where there is a kernel for it."""


@dataclass(frozen=True)
class CacheSettings:
    """How the layers of a cache store their tokens. Raises `RotationZooError` for a format with
    codes of more than 2 bits, which only a simulation reads."""

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
        if self.layout.format.bits != 2:
            raise RotationZooError(
                f"this cache stores codes of 2 bits, and the format has {self.layout.format.bits}",
                hint="evaluate it in a simulation: rotationzoo evaluate",
            )

    def page_layout(self, layer: int, side: str) -> PageLayout:
        """How a page holds the codes of a side."""
        return self.codec.page_layout(layer, side, self.block, self.layout.format)

    def for_layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> "CacheSettings":
        """The same with the rotations of one layer alone, on the device of its keys and values
        `[B, H, T, D]`. Raises `RotationZooError` where they are for other heads or dimensions."""
        return replace(self, codec=self.codec.for_layer(index, key, value))

    def __deepcopy__(self, memo: object) -> "CacheSettings":
        return self  # copies of a cache share its rotations


class CacheOptions(TypedDict, total=False):
    """The options of `RotatedCache`, which says what each of them is."""

    engine: str
    format: str
    bits: float
    sink: int
    recent: int
    group_size: int
    rounding: Rounding
    prefill_layout: Layout
    reading: Reading
    slack: int


def as_engine(options: CacheOptions, has_budget: bool = False) -> CacheOptions:
    """The options with all that the engine decides for rotations that may have a budget of bits.
    Raises `UsageError` for an engine whose codec is not simulated, and as `Budget` and
    `check_budget` do."""
    name = options.get("engine", DEFAULT)
    engine = find_engine(name)
    chosen: CacheOptions = {
        "engine": name,
        "format": choose_format(name, has_budget),
        "prefill_layout": engine.prefill_layout,
    }
    if not engine.feedback:
        chosen["rounding"] = "nearest"
    if not engine.windows:
        chosen |= {"sink": 0, "recent": 0}
    chosen |= options
    check_budget(Budget(chosen.get("bits")), has_budget, chosen["format"])
    return chosen


def complete_settings(recipe: Recipe, rotations: Rotations, options: CacheOptions) -> CacheSettings:
    """The settings that options make, with all that the engine decides in them, and a recipe."""
    layout = CacheLayout(
        SIMULATED[options["format"]],
        options.get("sink", recipe.sink),
        options.get("recent", recipe.recent),
        prefill_layout=options["prefill_layout"],
        group_size=options.get("group_size", recipe.group_size),
    )
    default: Rounding = "feedback" if rotations.has_feedback else "nearest"
    codec = RotatedCodec(rotations, layout.group_size, options.get("rounding", default))
    slack = options.get("slack", CacheSettings.slack)
    reading = options.get("reading", CacheSettings.reading)
    return CacheSettings(codec, layout, slack, reading=reading)


# ---- rotations as a cache takes them


def reduce_rotations(
    rotations: Rotations,
    group_size: int | None,
    uncentered: Collection[str],
    budget: Budget | None = None,
) -> Rotations:
    """Rotations as an engine takes them: without the means of the sides `uncentered`, and with
    another budget where one is given. Raises as `codec.bit_allocation.spend_bits` does."""
    if budget and (rotations.has_budget or not isinstance(budget, EvenBudget)):
        # A server spends no bits where rotations keep their own budget.
        from rotationzoo.codec.bit_allocation import spend_bits

        rotations = spend_bits(rotations, budget, group_size)

    def reduce(_: int, side: str, rotation: Rotation) -> Rotation:
        return replace(rotation, mean=None) if side in uncentered else rotation

    return rotations.replace(reduce)


def check_budget(budget: Budget | None, has_budget: bool, format: str) -> None:
    """Raise `UsageError` for another budget if the rotations have none, or if rows of the `format`
    cannot hold it."""
    if not budget:
        return
    if not has_budget:
        hint = "leave it out, or make some with: rotationzoo calibrate MODEL --bits 2.5"
        raise UsageError("--bits is for rotations that have a budget of bits, and none have", hint)
    if SIMULATED[format].offset != "none":
        hint = f"leave out --bits, or add: --format {BUDGETED}"
        raise UsageError(f"rows of the format {format} have the same bits in all layers", hint)


def budget_beside_others(budget: Budget | None, own: Budget, has_others: bool) -> Budget | None:
    """The budget, or rotations' `own`, in an engine that keeps layers with a sliding window exact,
    and states. Beside such layers all others get the same bits, because the engine pads the pages
    of all layers to the largest."""
    if not own or not has_others:
        return budget
    return EvenBudget(**asdict(budget or own))
