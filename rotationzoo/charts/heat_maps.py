"""Heat maps in the colours of viridis, which people with any colour vision tell apart."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import altair

from rotationzoo.charts.drawing import ROWS, Chart, specify, unchecked

_WIDTH, _HEIGHT = 250, 480  # pixels, at most
_WIDEST, _TALLEST, _LOWEST = 46, 30, 4  # of a cell
_LABELLED = 10  # columns or rows whose labels all have room
_BRIGHT = 0.44  # of the scale, from which black text on viridis has more contrast than white
_BORDERED = 12  # the height from which cells have borders
_EMPTY = "#8c959f33"
_MANY = 30  # of largest to smallest, from which colours are logarithmic
_DECADES = 1e-4  # of the largest value, below which all have one colour


@dataclass(frozen=True)
class Cell:
    """One cell. A `value` of None was not measured."""

    column: str
    row: str
    value: float | None
    label: str
    """What the cell shows, in words: where it is, and its value with a unit."""
    text: str = ""
    """What is written into it."""


@dataclass(frozen=True)
class Colours:
    """The scale of colours, the same for all maps that are compared."""

    title: str
    low: float
    high: float
    type: Literal["linear", "log"] = "linear"
    percent: bool = False

    @staticmethod
    def of(values: Sequence[float], title: str) -> "Colours":
        """A scale for all these values: logarithmic where they are positive and far apart."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if low > 0 and high > _MANY * low:
            return Colours(title, max(low, _DECADES * high), high, "log")
        low = min(low, 0.0)
        return Colours(title, low, high if high > low else low + 1)


@unchecked
def draw_map(cells: Sequence[Cell], columns: str, rows: str, colours: Colours) -> Chart:
    """A chart of cells in the order in which columns and rows first occur. `columns` and `rows` are
    the titles of the axes."""
    # Named in order, because cells that were not measured are a layer of their own.
    across_names = list(dict.fromkeys(cell.column for cell in cells))
    down_names = list(dict.fromkeys(cell.row for cell in cells))
    across, down = len(across_names), len(down_names)
    width = min(_WIDEST, _WIDTH / across)
    height = max(_LOWEST, min(_TALLEST, _HEIGHT / down))
    scale = altair.Scale(
        domain=[colours.low, colours.high], type=colours.type, scheme="viridis", clamp=True
    )
    legend = altair.Legend(
        gradientLength=180,
        gradientThickness=10,
        format=".0%" if colours.percent else "~g",
        tickCount=3,
        titleLimit=0,
    )
    # Vega measures labels to tell whether they overlap, as only many can.
    overlap = max(across, down) > _LABELLED
    axis = altair.Axis(labelAngle=0, ticks=False, domain=False, labelOverlap=overlap)
    bright = colours.low + _BRIGHT * (colours.high - colours.low)
    data = [{**asdict(cell), "ink": _ink(cell, bright)} for cell in cells]
    base = altair.Chart(ROWS).encode(
        x=altair.X("column:O", sort=across_names, title=columns, axis=axis),
        y=altair.Y("row:O", sort=down_names, title=rows, axis=axis),
    )
    # Between low cells, borders would be all that is seen.
    border = {"stroke": "currentColor", "strokeOpacity": 0.15, "strokeWidth": 0.5}
    if height < _BORDERED:
        border = {}
    measured = base.transform_filter("datum.value !== null").mark_rect(**border)
    layers = [
        measured.encode(
            color=altair.Color("value:Q", scale=scale, legend=legend, title=colours.title),
            description=altair.Description("label:N"),
        )
    ]
    if any(cell.value is None for cell in cells):
        empty = base.transform_filter("datum.value === null").mark_rect(color=_EMPTY, **border)
        layers.append(empty.encode(description=altair.Description("label:N")))
    if any(cell.text for cell in cells):
        ink = altair.Fill("ink:N", scale=None)
        layers.append(base.mark_text(aria=False).encode(text=altair.Text("text:N"), fill=ink))
    chart = altair.layer(*layers).properties(width=width * across, height=height * down)
    return specify(chart, data)


def _ink(cell: Cell, bright: float) -> str:
    """The colour of the text in a cell."""
    return "#000" if cell.value is not None and cell.value > bright else "#fff"
