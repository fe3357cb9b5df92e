"""The sides of what a layer caches: keys and values of heads, or latents that are read as both."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class CachedRows:
    """The rows that a layer caches of each token."""

    sides: tuple[str, ...]
    """Rows that are rotated and quantized."""
    beside: tuple[str, ...]
    """Rows that are cached next to them, and stay exact."""
    words: str
    """Their name for people ..."""
    name: str
    """... and with the usual abbreviation."""

    @property
    def pair(self) -> tuple[str, str]:
        """The sides that attention reads as keys and as values."""
        return self.sides[0], self.sides[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """All rows of a token."""
        return *self.sides, *self.beside


LATENT = "latent"
HEADS = CachedRows(("key", "value"), (), "keys and values", "keys and values")
LATENTS = CachedRows((LATENT,), ("rope",), "latents", "latents (MLA)")
"""MLA: one row for all heads, and a key with RoPE (`model.latent`)."""
SIDES = HEADS.sides
EVERY_SIDE = *HEADS.sides, *LATENTS.sides

_READERS = {"key": "query", "value": "output"}


def metric_kind(side: str) -> str:
    """The statistic that is the metric of errors of a side's stored rows."""
    return f"{side}_metric"


def is_metric(kind: str) -> bool:
    """Whether a statistic is the metric of errors of stored rows."""
    return kind.endswith("_metric")


def rows_of(sides: Collection[str]) -> CachedRows:
    """The cached rows with these sides."""
    return HEADS if set(sides).isdisjoint(LATENTS.sides) else LATENTS


def read_as(side: str) -> tuple[str, ...]:
    """What attention reads a side as: `key`, `value`, or both for a latent."""
    return SIDES if side in LATENTS.sides else (side,)


def cost_kinds(side: str) -> tuple[str, ...]:
    """The statistics whose second moments weight the errors of a side's rows: of queries and
    attention outputs. Both have one unit for a latent (`model.latent`), so they are added."""
    return tuple(_READERS[part] for part in read_as(side))
