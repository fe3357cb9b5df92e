"""The chart: every point in its place, and labels that never overlap, whatever the names."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from rotationzoo.report.charts import Point, draw_answers, draw_inline, draw_png

PHONE = 390 - 2 * 16 - 2 * 13  # pixels inside a figure
NAME = "<script>alert(1)</script>\"'&"
UNIT = "GB of cache"


def point(name: str, memory: float, share: float, **others) -> Point:
    return Point(name, memory, share, f"{share:.0%}", **others)


def labels_of(svg: str) -> list[str]:
    """The labels of all marks, as a screen reader reads them."""
    marks = ElementTree.fromstring(svg).iter()
    return [mark.get("aria-label") for mark in marks if "graphics-symbol" in mark.get("role", "")]


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("share", [0.0, 0.97, 1.0])
def test_labels_keep_apart_and_inside(count, share):
    points = [point(f"arm {number}" * (number % 9), 2.5, share) for number in range(count)]
    chart = draw_answers(points, UNIT)
    rows = sorted(chart["data"]["values"], key=lambda row: -row["place"])
    height = chart["height"]
    full = 0.2 if share == 0 else 1  # a chart of small shares ends at 20 %
    tops = [height * (1 - row["place"] / full) - 14 for row in rows]
    ends = [top + 14 * (1 + row["label"].count("\n")) for top, row in zip(tops, rows, strict=True)]
    assert tops[0] >= -1e-6
    assert ends[-1] <= height + 1e-6
    assert all(end <= top + 1e-6 for end, (_, top) in zip(ends, pairwise(tops), strict=False))
    root = ElementTree.fromstring(draw_inline(chart, "answers"))
    assert float(root.get("width")) <= PHONE


def test_names_are_escaped_in_labels_and_texts():
    chart = draw_answers([point(NAME, 2.5, 0.5, accent=True, interval=(0.4, 0.6))], NAME)
    inline = draw_inline(chart, NAME)
    assert "<script" not in inline
    assert labels_of(inline) == [f"{NAME}: 50% at 2.5 {NAME}"]
    assert draw_png(chart, NAME).startswith(b"\x89PNG")
