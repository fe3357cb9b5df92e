"""Lines, each told from the others by its colour, its dashes and the shape of its points."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import altair

from rotationzoo.charts.drawing import ROWS, Chart, specify, unchecked

# As far apart for any colour vision, and three times as bright or dark as a page, light or dark.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07C00", "#7f868f", "#A05AD5"]
_DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 1], [1, 3], [10, 4]]
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke"]
_WIDTH, _HEIGHT = 250, 190
_POINT, _DOT, _MANY = 45, 14, 24  # areas of points, and from how many on a line they are small


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


@unchecked
def draw_lines(points: Sequence[Point], axes: Axes) -> Chart:
    """A chart with a legend of its lines, in the order in which they first occur."""
    names = list(dict.fromkeys(point.line for point in points))
    base = _base(axes)
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
    marks = base.mark_point(filled=True, size=_POINT if places < _MANY else _DOT, opacity=1).encode(
        color=colour, shape=shape, description=altair.Description("label:N")
    )
    chart = altair.layer(lines, marks).properties(width=_WIDTH, height=_HEIGHT)
    return specify(chart, [asdict(point) for point in points])


@unchecked
def draw_bundle(points: Sequence[Point], axes: Axes, legend: str) -> Chart:
    """A chart of many lines of one kind, such as one for each layer, whose names are numbers. Their
    colours go from dark to light, and a scale titled `legend` explains them."""
    base = _base(axes).transform_calculate(number="toNumber(datum.line)")
    scale = altair.Legend(
        gradientLength=180, gradientThickness=10, format="d", tickMinStep=1, tickCount=4
    )
    colour = altair.Color(
        "number:Q", title=legend, legend=scale, scale=altair.Scale(scheme="viridis")
    )
    lines = base.mark_line(strokeWidth=1.2).encode(
        color=colour, detail=altair.Detail("line:N"), description=altair.Description("label:N")
    )
    chart = lines.properties(width=_WIDTH, height=_HEIGHT)
    return specify(chart, [asdict(point) for point in points])


def _base(axes: Axes) -> altair.Chart:
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
