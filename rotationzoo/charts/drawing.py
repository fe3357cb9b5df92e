"""Draws Vega-Lite charts on this machine: SVG for pages and for files, PNG for model cards."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
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


def unchecked(draw: Draw) -> Draw:
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


def specify(chart: altair.LayerChart | altair.Chart, rows: Sequence[dict[str, Any]]) -> Chart:
    """The specification of a chart of `ROWS`, which are these."""
    return {**chart.to_dict(validate=False), "datasets": {"rows": rows}}
