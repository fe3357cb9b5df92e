"""Charts: bars, lines and heat maps as Vega-Lite, drawn on this machine as SVG for pages and for
files, and as PNG for model cards. Heat maps have the colors of viridis, which people with any color
vision tell apart; lines differ by color, dashes and the shape of their points."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar
from xml.sax.saxutils import quoteattr

import altair
import vl_convert
from altair.utils.schemapi import debug_mode

Chart = dict[str, Any]
"""A chart as a specification of Vega-Lite, with its data."""
Draw = TypeVar("Draw", bound=Callable[..., Chart])
_INK = "currentColor"  # of the page around the drawing, so that one serves light and dark
_FONT = "Arial, Helvetica, sans-serif"
_TEXT = {"labelColor": _INK, "titleColor": _INK, "labelFont": _FONT, "titleFont": _FONT}
# A limit of 0 is none: Vega would measure each text once more, and that takes most of its time.
# Axes and legends are hidden from screen readers, because the label of every mark says it all.
CONFIG: dict[str, Any] = {
    "background": None,
    "padding": 4,
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        **_TEXT,
        "aria": False,
        "labelLimit": 0,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "domainColor": _INK,
        "domainOpacity": 0.4,
        "tickColor": _INK,
        "tickOpacity": 0.4,
        "gridColor": _INK,
        "gridOpacity": 0.12,
    },
    "legend": {
        **_TEXT,
        "aria": False,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "labelLimit": 0,
        "orient": "bottom",
    },
    "text": {"font": _FONT, "fontSize": 11, "fill": _INK},
    "title": {"color": _INK, "font": _FONT, "fontSize": 13, "anchor": "start"},
}
# Vega describes a mark's kind to screen readers, which the words of its label make superfluous.
_KIND = re.compile(r' aria-roledescription="[^"]*"')
_ID = re.compile(r' id="((?:gradient|clip)_?\d+)"')
_PNG_SCALE = 2  # pixels per unit, for screens of today
ROWS = altair.NamedData("rows")
"""The data of every chart by name: Altair would copy the rows themselves at every step."""
ACCENT, PLAIN = "#0072B2", "#7f868f"
_BAR_WIDTH, _STEP, _NAME = 130, 26, 110  # pixels; with name and words as wide as a phone
_GAP = 8
# As far apart for any colour vision, and three times as bright or dark as a page, light or dark.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07C00", "#7f868f", "#A05AD5"]
_DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 1], [1, 3], [10, 4]]
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke"]
_LINES_WIDTH, _LINES_HEIGHT = 250, 190
_POINT, _DOT, _MANY_POINTS = (
    45,
    14,
    24,
)  # areas of points, small from how many on
_MAP_WIDTH, _MAP_HEIGHT = 250, 480  # pixels, at most
_WIDEST, _TALLEST, _LOWEST = 46, 30, 4  # of a cell
_LABELLED = 10  # columns or rows whose labels all have room
_BRIGHT = 0.44  # of the scale, from which black text on viridis has more contrast than white
_BORDERED = 12  # the height from which cells have borders
_EMPTY = "#8c959f33"
_MANY = 30  # of largest to smallest, from which colours are logarithmic
_DECADES = 1e-4  # of the largest value, below which all have one colour


def _unchecked(draw: Draw) -> Draw:
    """Make a chart without comparing every part of it with altair's whole schema, which takes as
    long as ten drawings do. A test compares what is made."""
    quick: Draw = debug_mode(False)(draw)
    return quick


def draw_inline(chart: Chart, words: str, name: str) -> str:
    """An SVG for a page: its text takes the colour of the text around it. `words` say what it
    shows; every mark has a label that says its value. `name` begins the ids in it."""
    svg = _KIND.sub("", vl_convert.vegalite_to_svg({**chart, "config": CONFIG}))
    # Vega counts ids over all drawings of a process, and a page is to have the same bytes always.
    for number, identifier in enumerate(_ID.findall(svg)):
        svg = re.sub(rf"\b{identifier}\b", f"{name}-{number}", svg)
    svg = svg.replace('role="graphics-symbol"', 'role="graphics-symbol img"')
    return svg.replace("<svg ", f'<svg role="group" aria-label={quoteattr(words)} ', 1)


def draw_svg(chart: Chart, title: str) -> bytes:
    """An SVG file with a title, black on white."""
    return vl_convert.vegalite_to_svg(_titled(chart, title)).encode()


def draw_png(chart: Chart, title: str) -> bytes:
    """A PNG file with a title, black on white."""
    return vl_convert.vegalite_to_png(_titled(chart, title), scale=_PNG_SCALE)


def _titled(chart: Chart, title: str) -> Chart:
    config = {**CONFIG, "background": "white", "padding": 12}
    return {**chart, "title": title, "config": config}


def _specify(chart: altair.LayerChart | altair.Chart, rows: Sequence[dict[str, Any]]) -> Chart:
    """The specification of a chart of `ROWS`, which are these."""
    return {**chart.to_dict(validate=False), "datasets": {"rows": rows}}


# ---- bars


@dataclass(frozen=True)
class Bar:
    """One bar. `low` and `high` are the ends of its error bar, where an error is known."""

    name: str
    value: float
    words: str
    """The value as people read it."""
    accent: bool = False
    low: float | None = None
    high: float | None = None


@_unchecked
def draw_bars(
    bars: Sequence[Bar],
    scale: str,
    limits: tuple[float, float] | None = None,
    format: str | None = None,
) -> Chart:
    """A chart of bars from top to bottom, as they are given. `scale`: the title of the axis, with
    its unit. `limits`: its ends; by default it begins at 0 and holds all bars. `format`: of the
    axis' numbers, as d3 writes it."""
    rows = []
    for bar in bars:
        colour = ACCENT if bar.accent else PLAIN
        rows.append({**asdict(bar), "label": f"{bar.name}: {bar.words}", "colour": colour})
    names = altair.Axis(labelLimit=_NAME, labelPadding=6, ticks=False)
    base = altair.Chart(ROWS).encode(y=altair.Y("name:N", sort=None, title=None, axis=names))
    domain = altair.Scale() if limits is None else altair.Scale(domain=list(limits))
    axis = altair.Axis(tickCount=3) if format is None else altair.Axis(tickCount=3, format=format)
    drawn = base.mark_bar(height=14).encode(
        x=altair.X("value:Q", title=scale, scale=domain, axis=axis),
        color=altair.Color("colour:N", scale=None),
        description=altair.Description("label:N"),
    )
    errors = (
        base.transform_filter("datum.low !== null")
        .mark_rule(aria=False, color="currentColor", strokeWidth=1.5)
        .encode(x=altair.X("low:Q"), x2=altair.X2("high:Q"))
    )
    words = base.mark_text(aria=False, align="left").encode(
        x=altair.XValue(_BAR_WIDTH + _GAP), text=altair.Text("words:N")
    )
    chart = altair.layer(drawn, errors, words).properties(
        width=_BAR_WIDTH, height=_STEP * len(rows)
    )
    return _specify(chart, rows)


# ---- lines


@dataclass(frozen=True)
class Point:
    """One point of a line. `label` says its values in words, with units."""

    line: str
    x: float | str
    y: float
    label: str


@dataclass(frozen=True)
class Axes:
    """The titles of both axes with their units, and their scales."""

    x: str
    y: str
    x_type: Literal["quantitative", "ordinal"] = "quantitative"
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    from_zero: bool = True
    """Whether y begins at 0."""
    percent: bool = False
    """Whether y is a share, shown in percent."""


@_unchecked
def draw_lines(points: Sequence[Point], axes: Axes) -> Chart:
    """A chart with a legend of its lines, in the order in which they first occur."""
    names = list(dict.fromkeys(point.line for point in points))
    base = _base_of_lines(axes)
    several = range(len(names))
    colours = [_COLOURS[i % len(_COLOURS)] for i in several]
    dashes = [_DASHES[i % len(_DASHES)] for i in several]
    shapes = [_SHAPES[i % len(_SHAPES)] for i in several]
    legend = altair.Legend(title=None, columns=2, symbolStrokeWidth=2)
    colour = altair.Color("line:N", scale=altair.Scale(domain=names, range=colours), legend=legend)
    dash = altair.StrokeDash("line:N", scale=altair.Scale(domain=names, range=dashes))
    shape = altair.Shape("line:N", scale=altair.Scale(domain=names, range=shapes))
    lines = base.mark_line(aria=False, strokeWidth=1.5).encode(color=colour, strokeDash=dash)
    places = len({point.x for point in points})
    marks = base.mark_point(
        filled=True, size=_POINT if places < _MANY_POINTS else _DOT, opacity=1
    ).encode(color=colour, shape=shape, description=altair.Description("label:N"))
    chart = altair.layer(lines, marks).properties(width=_LINES_WIDTH, height=_LINES_HEIGHT)
    return _specify(chart, [asdict(point) for point in points])


@_unchecked
def draw_bundle(points: Sequence[Point], axes: Axes, legend: str) -> Chart:
    """A chart of many lines of one kind, such as one for each layer, whose names are numbers. Their
    colours go from dark to light, and a scale titled `legend` explains them."""
    base = _base_of_lines(axes).transform_calculate(number="toNumber(datum.line)")
    scale = altair.Legend(
        gradientLength=180, gradientThickness=10, format="d", tickMinStep=1, tickCount=4
    )
    colour = altair.Color(
        "number:Q", title=legend, legend=scale, scale=altair.Scale(scheme="viridis")
    )
    lines = base.mark_line(strokeWidth=1.2).encode(
        color=colour, detail=altair.Detail("line:N"), description=altair.Description("label:N")
    )
    chart = lines.properties(width=_LINES_WIDTH, height=_LINES_HEIGHT)
    return _specify(chart, [asdict(point) for point in points])


def _base_of_lines(axes: Axes) -> altair.Chart:
    vertical = altair.Axis(tickCount=5, format="~%") if axes.percent else altair.Axis(tickCount=5)
    scale = altair.Scale(type=axes.y_scale)
    if axes.y_scale == "linear":
        scale = altair.Scale(zero=axes.from_zero)
    return altair.Chart(ROWS).encode(
        x=_horizontal(axes), y=altair.Y("y:Q", title=axes.y, scale=scale, axis=vertical)
    )


def _horizontal(axes: Axes) -> altair.X:
    if axes.x_type == "ordinal":
        return altair.X("x:O", sort=None, title=axes.x).axis(labelAngle=-35, labelOverlap=True)
    scale = altair.Scale(type=axes.x_scale, zero=False, nice=False)
    return altair.X("x:Q", title=axes.x, scale=scale).axis(
        labelOverlap=True, tickCount=5, tickMinStep=1, format=",d"
    )


# ---- heat maps


@dataclass(frozen=True)
class Cell:
    """One cell. A `value` of None was not measured."""

    column: str
    row: str
    value: float | None
    label: str
    """The cell in words: where it is, and its value with a unit."""
    text: str = ""
    """The text that is written into it."""


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


@_unchecked
def draw_map(cells: Sequence[Cell], columns: str, rows: str, colours: Colours) -> Chart:
    """A chart of cells in the order in which columns and rows first occur. `columns` and `rows` are
    the titles of the axes."""
    # Named in order, because cells that were not measured are a layer of their own.
    across_names = list(dict.fromkeys(cell.column for cell in cells))
    down_names = list(dict.fromkeys(cell.row for cell in cells))
    across, down = len(across_names), len(down_names)
    width = min(_WIDEST, _MAP_WIDTH / across)
    height = max(_LOWEST, min(_TALLEST, _MAP_HEIGHT / down))
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
    return _specify(chart, data)


def _ink(cell: Cell, bright: float) -> str:
    """The colour of the text in a cell."""
    return "#000" if cell.value is not None and cell.value > bright else "#fff"
