"""Horizontal bars, each with its name on the left and its value in words on the right."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import altair

from rotationzoo.charts.drawing import ROWS, Chart, specify, unchecked

ACCENT, PLAIN = "#0072B2", "#7f868f"
_WIDTH, _STEP, _NAME = 130, 26, 110  # pixels; with name and words as wide as a phone
_GAP = 8


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


@unchecked
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
        x=altair.XValue(_WIDTH + _GAP), text=altair.Text("words:N")
    )
    chart = altair.layer(drawn, errors, words).properties(width=_WIDTH, height=_STEP * len(rows))
    return specify(chart, rows)
