"""The options of a cache that stores codes: of `RotatedCache`, `generate` and a server."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from rotationzoo.budget import Budget
from rotationzoo.codec.engine_needs import DEFAULT, EngineName, choose_format, find_engine
from rotationzoo.codec.formats import BUDGETED, SIMULATED
from rotationzoo.errors import UsageError
from rotationzoo.settings_base import Settings, option

Rounding = Literal["nearest", "transform"]
Layout = Literal["server", "window"]
Reading = Literal["auto", "rows", "pages"]
"""Restored `rows`, or the `pages` themselves. `auto` reads pages if there is a kernel for it."""
if TYPE_CHECKING:
    from rotationzoo.recipe import Recipe

    Format = str
else:
    Format = Literal[tuple(SIMULATED)]

# ---- options that other settings and commands also have

Engine = Annotated[EngineName | None, option("The engine that serves it.", "--for")]
FormatName = Annotated[Format | None, option("The 2-bit format.")]
Bits = Annotated[float | None, option("Another budget of bits.", "--bits", min=1, max=4)]
PrefillLayout = Annotated[Layout | None, option("Earlier tokens that a chunk reads exact.")]
Sink = Annotated[int | None, option("First tokens kept exact (the recipe's).", min=0)]


def check_budget(budget: Budget | None, has_budget: bool, format: str) -> None:
    """Raise `UsageError` for a budget that no rotations have, or that the `format` cannot store."""
    if not budget:
        return
    if not has_budget:
        hint = "leave it out, or make some with: rotationzoo calibrate MODEL --bits 2.5"
        raise UsageError("--bits is for rotations that have a budget of bits, and none have", hint)
    if SIMULATED[format].offset != "none":
        hint = f"leave out --bits, or add: --format {BUDGETED}"
        raise UsageError(f"rows of the format {format} have the same bits in all layers", hint)


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Settings):
    """The options of `RotatedCache`, None if open. Raises `UsageError` for invalid numbers."""

    engine: Engine = None
    format: FormatName = None
    bits: Bits = None
    sink: Sink = None
    recent: int | None = option("Last tokens kept exact (the recipe's).", min=0)
    group_size: int | None = None
    prefill_layout: PrefillLayout = None
    reading: Reading = "auto"
    slack: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"sink": 0, "recent": 0, "slack": 0, "group_size": 1}.items():
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or number < least):
                problem = f"{name} must be a whole number of at least {least}, not {number!r}"
                raise UsageError(problem, hint=f"{name}=64")

    def as_engine(self, has_budget: bool = False) -> Self:
        """The options as the engine completes them, for rotations with or without a budget. Raises
        `UsageError` as `choose_format`, `Budget` and `check_budget` do."""
        name = self.engine or DEFAULT
        engine, format = find_engine(name), choose_format(name, has_budget)
        layout = engine.prefill_layout
        chosen: dict[str, str | int] = {"engine": name, "format": format, "prefill_layout": layout}
        if not engine.windows:
            chosen |= {"sink": 0, "recent": 0}
        known = self.complete(**chosen)
        check_budget(Budget(self.bits), has_budget, str(known.format))
        return known

    def windows(self, recipe: "Recipe") -> tuple[int, int]:
        """Sink and recent tokens: the recipe's if they are left open."""
        sink = recipe.sink if self.sink is None else self.sink
        recent = recipe.recent if self.recent is None else self.recent
        return sink, recent
