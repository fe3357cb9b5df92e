"""The parts of a page: sections with words, pictures and the tables behind them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from markupsafe import Markup

from rotationzoo.report.charts import Chart, draw_inline
from rotationzoo.report.tables import Table


@dataclass(frozen=True)
class Figure:
    """A picture with its numbers. `name` is that of its place on the page."""

    name: str
    chart: Chart
    table: Table

    @property
    def title(self) -> str:
        """The title of both."""
        return self.table.title

    @cached_property
    def svg(self) -> Markup:
        """The drawing for a page. The library that draws it escapes names."""
        return Markup(draw_inline(self.chart, self.title))


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, paragraphs, pictures, and tables that are always visible."""

    anchor: str
    title: str
    lead: str = field(default="", kw_only=True)
    """The conclusion, set apart."""
    words: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    listed: Sequence[str] = field(default=())
    """Sentences shown as a list."""
    commands: Sequence[str] = ()
    """Commands to copy."""
