"""The parts of a page: sections with words, pictures and the tables behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from markupsafe import Markup

from rotationzoo.report.charts import (
    Axes,
    Cell,
    Chart,
    Colours,
    Point,
    draw_inline,
    draw_lines,
    draw_map,
)
from rotationzoo.report.tables import Table, pad
from rotationzoo.words import number


@dataclass(frozen=True)
class Figure:
    """A picture with its numbers. `name` is that of its file."""

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
        return Markup(draw_inline(self.chart, self.title, self.name))


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


def map_heads(
    table: tuple[str, str],
    label: str,
    by_layer: Mapping[int, Sequence[float | None]],
    colours: Colours,
    figure: str = "",
) -> Figure:
    """A map of layers and KV heads. `table`: the name of its file, and its title; `label` and
    `figure`: the words before the place and before the value of each cell."""
    cells, rows = [], []
    for layer, values in by_layer.items():
        for head, value in enumerate(values):
            words = "not measured" if value is None else f"{figure}{number(value)}"
            place = f"{label}, layer {layer}, KV head {head}: {words}"
            cells.append(Cell(str(head), str(layer), value, place))
        rows.append([str(layer), *map(number, values)])
    padded = pad(rows)
    columns = ["layer", *[f"head {head}" for head in range(len(padded[0]) - 1)]]
    name, title = table
    return Figure(name, draw_map(cells, "KV head", "layer", colours), Table(title, columns, padded))


def draw_by_layer(
    table: tuple[str, str],
    lines: Mapping[str, Mapping[int, float]],
    axes: Axes,
    figure: str,
    format: str = ".4g",
) -> Figure:
    """A line over the layers for each label. `table`: the name of its file, and its title;
    `figure`: the words of a value, such as `effective rank {:.1f}`."""
    points = []
    for label, line in lines.items():
        for layer, value in line.items():
            words = f"{label}, layer {layer}: {figure.format(value)}"
            points.append(Point(label, layer, value, words))
    rows = []
    for layer in sorted({layer for line in lines.values() for layer in line}):
        cells = [number(line.get(layer), format) for line in lines.values()]
        rows.append([str(layer), *cells])
    name, title = table
    return Figure(name, draw_lines(points, axes), Table(title, ["layer", *lines], rows))
