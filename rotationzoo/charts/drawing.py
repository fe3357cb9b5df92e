"""Draws Vega-Lite charts on this machine: SVG for pages and for files, PNG for model cards."""

import re
from typing import Any
from xml.sax.saxutils import quoteattr

import altair
import vl_convert

Chart = Any
"""A chart of altair: one of its many classes, all of which have `to_dict`."""
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


def draw_inline(chart: Chart, words: str, name: str) -> str:
    """An SVG for a page: its text takes the colour of the text around it. `words` say what it
    shows; every mark has a label that says its value. `name` begins the ids in it."""
    svg = _KIND.sub("", vl_convert.vegalite_to_svg(_specification(chart)))
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


def _specification(chart: Chart) -> dict[str, Any]:
    # Validation against the whole schema would take longer than drawing does.
    specification: dict[str, Any] = chart.to_dict(validate=False)
    return {**specification, "config": CONFIG}


def _titled(chart: Chart, title: str) -> dict[str, Any]:
    config = {**CONFIG, "background": "white", "padding": 12}
    return {**_specification(chart), "title": title, "config": config}


def rows_of(rows: list[dict[str, Any]]) -> altair.InlineData:
    """Rows as a chart's data, whatever their number."""
    return altair.Data(values=rows)
