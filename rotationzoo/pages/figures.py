"""What a page is made of: sections with words, pictures and the tables behind them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from markupsafe import Markup

from rotationzoo.charts.drawing import Chart, draw_inline


@dataclass(frozen=True)
class Table:
    """Cells as people read them. The first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A picture with its title and its numbers. `name` is that of its file."""

    name: str
    title: str
    chart: Chart
    table: Table

    @cached_property
    def svg(self) -> Markup:
        """The drawing for a page. The library that draws it escapes names."""
        return Markup(draw_inline(self.chart, self.title, self.name))


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, paragraphs, pictures, and a table that is always visible."""

    anchor: str
    title: str
    lead: str = field(default="", kw_only=True)
    """What to take away, set apart."""
    words: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    table: Table | None = None
    listed: Sequence[str] = field(default=())
    """Sentences shown as a list."""
    commands: Sequence[str] = ()
    """Commands to copy."""


def percent(value: float | None, digits: int = 0) -> str:
    """A share, or a dash where it was not measured."""
    return "-" if value is None else f"{value:.{digits}%}"


def number(value: float | None, format: str = ".4g") -> str:
    """A number, or a dash where it was not measured."""
    return "-" if value is None else f"{value:{format}}"
