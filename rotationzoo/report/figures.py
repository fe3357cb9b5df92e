"""The parts of a page: sections with words, a picture, commands and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from rotationzoo.report.charts import Chart, draw_inline
from rotationzoo.report.tables import Table


@dataclass(frozen=True)
class Figure:
    """A picture with its title."""

    title: str
    chart: Chart

    @cached_property
    def svg(self) -> Markup:
        """The drawing for a page. The library that draws it escapes names."""
        return Markup(draw_inline(self.chart, self.title))


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page: a heading, and what stands below it in this order."""

    anchor: str
    title: str
    lead: str = ""
    """The conclusion, set apart."""
    words: Sequence[str] = ()
    """Paragraphs."""
    facts: Sequence[tuple[str, str]] = ()
    """Names and values."""
    listed: Sequence[str] = ()
    """Sentences shown as a list."""
    figure: Figure | None = None
    commands: Sequence[str] = ()
    """Commands to copy."""
    tables: Sequence[Table] = ()
