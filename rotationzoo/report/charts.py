"""The parts of a page, and its chart of answers over memory as Vega-Lite, drawn on this machine as
SVG for pages and as PNG for model cards."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any
from xml.sax.saxutils import quoteattr

import altair
import vl_convert
from markupsafe import Markup

from rotationzoo.report.tables import Table

Chart = dict[str, Any]
"""A chart as a specification of Vega-Lite, with its data."""
_INK = "currentColor"  # of the page around the drawing, so that one serves light and dark
_FONT = "Arial, Helvetica, sans-serif"
_TEXT = {"labelColor": _INK, "titleColor": _INK, "labelFont": _FONT, "titleFont": _FONT}
# The size is fixed, because Vega measures text in one font and browsers show it in another. The
# room for text is what it takes in the widest font of an operating system. All are pixels.
_WIDTH, _LEFT, _TOP, _BOTTOM = 332, 38, 10, 36  # as wide as a phone
_LEAST_PLOT, _LEAST_HEIGHT = 112, 176
_SIZE, _LINE, _TITLE, _TITLE_LINE = 11, 14, 13, 18  # of text and of its lines
_ELBOW, _LABEL = 5, 18  # where leaders bend and end, right of the plot
_WIDEST = (_WIDTH - _LEFT - _LEAST_PLOT - _LABEL) / _SIZE  # of a line of a label, in ems
_LINES = 2  # of a label
# A limit of 0 is none: Vega would measure each text once more, and that takes most of its time.
# Axes are hidden from screen readers, because the label of every mark says it all.
CONFIG: dict[str, Any] = {
    "background": None,
    "autosize": "none",
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        **_TEXT,
        "aria": False,
        "labelLimit": 0,
        "labelFontSize": _SIZE,
        "titleFontSize": _SIZE,
        "titleFontWeight": "normal",
        "titleAnchor": "start",
        "domainColor": _INK,
        "domainOpacity": 0.4,
        "tickColor": _INK,
        "tickOpacity": 0.4,
        "gridColor": _INK,
        "gridOpacity": 0.12,
    },
    "text": {
        "font": _FONT,
        "fontSize": _SIZE,
        "lineHeight": _LINE,
        "lineBreak": "\n",
        "fill": _INK,
    },
    "title": {
        "color": _INK,
        "font": _FONT,
        "fontSize": _TITLE,
        "lineHeight": _TITLE_LINE,
        "anchor": "start",
        "frame": "group",
    },
}
# Vega describes a mark's kind to screen readers, which the words of its label make superfluous.
_KIND = re.compile(r' aria-roledescription="[^"]*"')
_PNG_SCALE = 2  # pixels per unit, for screens of today
_FULL = (0.2, 0.5, 1)  # shares at the top of a chart: the first that holds all
_ACCENT, _PLAIN = "#0072B2", "#7f868f"
# Ems of a character in bold DejaVu Sans, the widest of the usual fonts: small ones, and others.
_SMALL, _LARGE, _FOREIGN = 0.72, 1.1, 1.3
_SMALL_ONES = frozenset("abcdefghijklnopqrstuvxyz0123456789 .,:;-_/|()[]'")


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


def draw_inline(chart: Chart, words: str) -> str:
    """An SVG for a page: its text takes the colour of the text around it. `words` say what it
    shows; every mark has a label that says its value."""
    svg = _KIND.sub("", vl_convert.vegalite_to_svg({**chart, "config": CONFIG}))
    svg = svg.replace('role="graphics-symbol"', 'role="graphics-symbol img"')
    return svg.replace("<svg ", f'<svg role="group" aria-label={quoteattr(words)} ', 1)


def draw_png(chart: Chart, title: str) -> bytes:
    """A PNG file with a title, black on white."""
    lines = _break(title, (_WIDTH - 2 * _TOP) / _TITLE)
    padding = {**chart["padding"], "top": 2 * _TOP + _TITLE_LINE * len(lines)}
    text = {"text": lines, "offset": _TOP, "dx": _TOP - _LEFT}
    config = {**CONFIG, "background": "white"}
    titled = {**chart, "title": text, "padding": padding, "config": config}
    return vl_convert.vegalite_to_png(titled, scale=_PNG_SCALE)


@dataclass(frozen=True)
class Point:
    """One cache: the memory that it takes, and the share of questions that are answered from it,
    with its interval where it is shown."""

    name: str
    memory: float
    share: float
    percent: str
    """The share as people read it."""
    accent: bool = False
    interval: tuple[float, float] | None = None


def draw_answers(points: Sequence[Point], unit: str) -> Chart:
    """A chart of the `points`, each with its label at the right, in the order of shares.

    `unit`: what the memory of a point counts, which is the title of the axis.
    """
    ranked = sorted(points, key=lambda point: (-point.share, -point.memory, not point.accent))
    labels = [_wrap(point.name, point.percent) for point in ranked]
    heights = [_LINE * len(lines) for lines in labels]
    height = max(_LEAST_HEIGHT, sum(heights))
    highest = max(max([point.share, *(point.interval or [])]) for point in ranked)
    full = next(end for end in _FULL if end >= highest)
    tops = [height * (1 - point.share / full) - _LINE / 2 for point in ranked]
    rows = []
    for point, lines, top in zip(ranked, labels, _spread(tops, heights, height), strict=True):
        drawn = {
            **asdict(point),
            "label": "\n".join(lines),
            "place": full * (1 - (top + _LINE / 2) / height),
            "words": f"{point.name}: {point.percent} at {point.memory:.3g} {unit}",
            "color": _ACCENT if point.accent else _PLAIN,
        }
        rows.append(drawn)
    # What is judged covers others that have the same share in the same bytes.
    rows.sort(key=itemgetter("accent"))
    widest = _SIZE * max(_measure(line) for lines in labels for line in lines)
    width = round(_WIDTH - _LEFT - _LABEL - widest)
    padding = {"left": _LEFT, "right": _WIDTH - _LEFT - width, "top": _TOP, "bottom": _BOTTOM}
    chart = altair.layer(*_draw_marks(rows, unit, width, full))
    return {**chart.properties(width=width, height=height).to_dict(), "padding": padding}


def _draw_marks(
    rows: list[dict[str, Any]], unit: str, width: int, full: float
) -> list[altair.Chart]:
    """Leaders, the interval, points and labels of the `rows`, one above the other. `full` is the
    share at the top."""
    base = altair.Chart(altair.Data(values=rows))
    shares = altair.Axis(values=[0, full / 2, full], format="~%", title=None)
    sizes = altair.Axis(tickCount=3, grid=False, title=unit)
    x = altair.X("memory:Q", scale=altair.Scale(zero=True, nice=False), axis=sizes)
    y = altair.Y("share:Q", scale=altair.Scale(domain=[0, full], nice=False), axis=shares)
    elbow, end = width + _ELBOW, width + _LABEL
    leader = base.mark_rule(aria=False, color=_INK, opacity=0.3)
    marks = [
        leader.encode(x=x, x2=altair.X2Value(elbow), y=y),
        leader.encode(
            x=altair.XValue(elbow), x2=altair.X2Value(end - 3), y=y, y2=altair.Y2("place:Q")
        ),
        base.transform_filter("datum.interval !== null")
        .transform_calculate(low="datum.interval[0]", high="datum.interval[1]")
        .mark_rule(aria=False, color=_ACCENT, strokeWidth=5, opacity=0.45)
        .encode(x=x, y=altair.Y("low:Q"), y2=altair.Y2("high:Q")),
    ]
    bold = altair.expr("datum.accent ? 'bold' : 'normal'")
    color, words = altair.Color("color:N", scale=None), altair.Description("words:N")
    points = base.mark_circle(size=70, opacity=1).encode(x=x, y=y, color=color, description=words)
    text = base.mark_text(aria=False, align="left", baseline="middle", fontWeight=bold).encode(
        x=altair.XValue(end), y=altair.Y("place:Q"), text=altair.Text("label:N")
    )
    return [*marks, points, text]


def _spread(wanted: Sequence[float], heights: Sequence[float], room: float) -> list[float]:
    """The tops of labels from top to bottom, near the `wanted` ones: none overlaps the next, and
    all are in the `room`, which holds them."""
    tops, end = [], 0.0
    for top, height in zip(wanted, heights, strict=True):
        tops.append(max(top, end))
        end = tops[-1] + height
    end = room
    for index in reversed(range(len(tops))):
        tops[index] = min(tops[index], end - heights[index])
        end = tops[index]
    return tops


def _wrap(name: str, percent: str) -> list[str]:
    """A label in lines that fit in any font; a name that is too long for them loses its middle."""
    shown, kept = " ".join(name.split()), len(name)
    while len(lines := _break(f"{shown} {percent}", _WIDEST)) > _LINES:
        kept -= 1
        cut = f"{name[: kept - kept // 2]}\u2026{name[len(name) - kept // 2 :]}"
        shown = " ".join(cut.split())
    return lines


def _break(words: str, widest: float) -> list[str]:
    """Words in lines of at most so many ems, which end at a mark between words if there is one."""
    lines, line = [], ""
    for character in words:
        if _measure(line + character) > widest:
            end = max(line.rfind(mark) for mark in " +-_/") + 1 or len(line)
            lines.append(line[:end].rstrip())
            line = line[end:]
        line += character
    return [*lines, line]


def _measure(words: str) -> float:
    """Ems that some words take in the widest font."""
    width = 0.0
    for character in words:
        large = _LARGE if character.isascii() else _FOREIGN
        width += _SMALL if character in _SMALL_ONES else large
    return width
