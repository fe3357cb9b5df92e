"""Charts: bars as Vega-Lite, drawn on this machine as SVG for pages and as PNG for model cards."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from xml.sax.saxutils import quoteattr

import altair
import vl_convert

Chart = dict[str, Any]
"""A chart as a specification of Vega-Lite, with its data."""
_INK = "currentColor"  # of the page around the drawing, so that one serves light and dark
_FONT = "Arial, Helvetica, sans-serif"
_TEXT = {"labelColor": _INK, "titleColor": _INK, "labelFont": _FONT, "titleFont": _FONT}
# A limit of 0 is none: Vega would measure each text once more, and that takes most of its time.
# Axes are hidden from screen readers, because the label of every mark says it all.
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
    "text": {"font": _FONT, "fontSize": 11, "fill": _INK},
    "title": {"color": _INK, "font": _FONT, "fontSize": 13, "anchor": "start"},
}
# Vega describes a mark's kind to screen readers, which the words of its label make superfluous.
_KIND = re.compile(r' aria-roledescription="[^"]*"')
_PNG_SCALE = 2  # pixels per unit, for screens of today
_ACCENT, _PLAIN = "#0072B2", "#7f868f"
_BAR_WIDTH, _STEP, _NAME = 130, 26, 110  # pixels; with name and words as wide as a phone
_GAP = 8


def draw_inline(chart: Chart, words: str) -> str:
    """An SVG for a page: its text takes the colour of the text around it. `words` say what it
    shows; every mark has a label that says its value."""
    svg = _KIND.sub("", vl_convert.vegalite_to_svg({**chart, "config": CONFIG}))
    svg = svg.replace('role="graphics-symbol"', 'role="graphics-symbol img"')
    return svg.replace("<svg ", f'<svg role="group" aria-label={quoteattr(words)} ', 1)


def draw_png(chart: Chart, title: str) -> bytes:
    """A PNG file with a title, black on white."""
    config = {**CONFIG, "background": "white", "padding": 12}
    titled = {**chart, "title": title, "config": config}
    return vl_convert.vegalite_to_png(titled, scale=_PNG_SCALE)


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
        colour = _ACCENT if bar.accent else _PLAIN
        rows.append({**asdict(bar), "label": f"{bar.name}: {bar.words}", "colour": colour})
    names = altair.Axis(labelLimit=_NAME, labelPadding=6, ticks=False)
    base = altair.Chart(altair.Data(values=rows)).encode(
        y=altair.Y("name:N", sort=None, title=None, axis=names)
    )
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
    specification: Chart = chart.to_dict()
    return specification
