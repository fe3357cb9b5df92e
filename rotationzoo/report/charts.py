"""The chart of answers over memory, made with Altair: SVG for pages, PNG for model cards."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from markupsafe import Markup

if TYPE_CHECKING:
    import altair

Chart = dict[str, Any]
"""A chart as a specification of Vega-Lite, with its data."""
_INK = "currentColor"  # of the page around it, so that one drawing fits light and dark
_INKED = "labelColor", "titleColor", "domainColor", "tickColor", "gridColor"
# Pixels for the width of a phone. Fixed, because browsers may use another font than Vega measures.
_PADDING = {"left": 38, "right": 174, "top": 10, "bottom": 36}
_PLOT, _LEAST_HEIGHT = 120, 176
_LABEL = _PLOT + 18  # where labels begin
_LABEL_LINE = 14
_WIDEST = 118  # of a line of a label; an operating system's widest font takes a third more
_TITLE = 50  # characters of a line
CONFIG: dict[str, Any] = {
    "background": None,
    "autosize": "none",
    "padding": _PADDING,
    "font": "Arial, Helvetica, sans-serif",
    "view": {"stroke": None},
    # Axes are hidden from screen readers, because every mark has a label. Without a limit (0), Vega
    # does not spend most of its time on measuring text again.
    "axis": {
        **dict.fromkeys(_INKED, _INK),
        "aria": False,
        "labelLimit": 0,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "titleAnchor": "start",
        "domainOpacity": 0.4,
        "tickOpacity": 0.4,
        "gridOpacity": 0.12,
    },
    "text": {"fontSize": 11, "lineHeight": _LABEL_LINE, "lineBreak": "\n", "fill": _INK},
}
# Vega tells screen readers a mark's kind, but its label is enough.
_KIND = re.compile(r' aria-roledescription="[^"]*"')
_PNG_SCALE = 2  # pixels per unit
_FULL = (0.2, 0.5, 1)  # the share at the top of a chart: the first that is large enough
_ACCENT, _PLAIN = "#0072B2", "#7f868f"


NOT_DRAWN = (
    "the chart was not drawn, because the extra `report` is missing; to draw it, run: "
    "pip install 'altair>=6' 'vl-convert-python>=1.9'"
)


def is_installed() -> bool:
    """Whether the extra `report` is installed, which draws charts."""
    return all(find_spec(name) for name in ("altair", "vl_convert"))


def draw_inline(chart: Chart, words: str) -> str:
    """An SVG for a page, in the color of the text around it. `words` describe it."""
    import vl_convert

    svg = _KIND.sub("", vl_convert.vegalite_to_svg({**chart, "config": CONFIG}))
    svg = svg.replace('role="graphics-symbol"', 'role="graphics-symbol img"')
    return svg.replace("<svg ", f'<svg role="group" aria-label={quoteattr(words)} ', 1)


def draw_png(chart: Chart, title: str) -> bytes:
    """A PNG file with a title, black on white."""
    import vl_convert

    lines = {"text": textwrap.wrap(title, _TITLE), "anchor": "start", "frame": "group"}
    fitting = {"background": "white", "autosize": "pad", "padding": _PADDING["top"]}
    titled = {**chart, "title": lines, "config": {**CONFIG, **fitting}}
    return vl_convert.vegalite_to_png(titled, scale=_PNG_SCALE)


@dataclass(frozen=True)
class Point:
    """One cache: its memory, the share of answers that it keeps, and maybe the interval."""

    name: str
    memory: float
    share: float
    percent: str  # the share in words
    accent: bool = False
    interval: list[float] | None = None


def draw_answers(points: Sequence[Point], unit: str) -> Chart:
    """A chart of the `points`, labeled on the right in the order of shares. `unit`: of memory."""
    import altair

    ranked = sorted(points, key=lambda point: (-point.share, -point.memory, not point.accent))
    highest = max(max([point.share, *(point.interval or [])]) for point in ranked)
    full = next(end for end in _FULL if end >= highest)
    rows = []
    for rank, point in enumerate(ranked):
        drawn = {
            **asdict(point),
            "label": f"{' '.join(point.name.split())}\n{point.percent}",
            "place": full * (1 - (rank + 0.5) / len(ranked)),
            "words": f"{point.name}: {point.percent} at {point.memory:.3g} {unit}",
            "color": _ACCENT if point.accent else _PLAIN,
        }
        rows.append(drawn)
    # The accent covers equal points.
    rows.sort(key=itemgetter("accent"))
    height = max(_LEAST_HEIGHT, 2 * _LABEL_LINE * len(rows))
    layers = altair.layer(*_draw_marks(rows, unit, full))
    chart: Chart = layers.properties(width=_PLOT, height=height).to_dict()
    return chart


def _draw_marks(rows: list[dict[str, Any]], unit: str, full: float) -> list["altair.Chart"]:
    """Layers of leaders, the interval, points and labels. `full`: the share at the top."""
    import altair

    base = altair.Chart(altair.Data(values=rows))
    shares = altair.Axis(values=[0, full / 2, full], format="~%", title=None)
    sizes = altair.Axis(tickCount=3, grid=False, title=unit)
    x = altair.X("memory:Q", scale=altair.Scale(zero=True, nice=False), axis=sizes)
    y = altair.Y("share:Q", scale=altair.Scale(domain=[0, full], nice=False), axis=shares)
    place, end = altair.Y("place:Q"), altair.X2Value(_LABEL - 3)
    leader = base.mark_rule(aria=False, color=_INK, opacity=0.3)
    interval = (
        base.transform_filter("datum.interval !== null")
        .transform_calculate(low="datum.interval[0]", high="datum.interval[1]")
        .mark_rule(aria=False, color=_ACCENT, strokeWidth=5, opacity=0.45)
        .encode(x=x, y=altair.Y("low:Q"), y2=altair.Y2("high:Q"))
    )
    color, words = altair.Color("color:N", scale=None), altair.Description("words:N")
    points = base.mark_circle(size=70, opacity=1).encode(x=x, y=y, color=color, description=words)
    bold = altair.expr("datum.accent ? 'bold' : 'normal'")
    # The two lines of a label stand around its place.
    text = base.mark_text(
        aria=False,
        align="left",
        baseline="middle",
        fontWeight=bold,
        limit=_WIDEST,
        dy=-_LABEL_LINE / 2,
    )
    label = text.encode(x=altair.XValue(_LABEL), y=place, text=altair.Text("label:N"))
    return [leader.encode(x=x, x2=end, y=y, y2=altair.Y2("place:Q")), interval, points, label]


@dataclass(frozen=True)
class Figure:
    """A chart with its title, drawn if the extra `report` is installed."""

    title: str
    points: Sequence[Point]
    unit: str

    @cached_property
    def chart(self) -> Chart:
        return draw_answers(self.points, self.unit)

    @cached_property
    def svg(self) -> Markup | None:
        """The drawing for a page. The library that draws it escapes names."""
        return Markup(draw_inline(self.chart, self.title)) if is_installed() else None
