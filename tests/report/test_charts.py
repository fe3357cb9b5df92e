"""Charts: what they draw, whatever the number of bars, and whatever the names."""

from xml.etree import ElementTree

import pytest

from rotationzoo.report.charts import Bar, draw_bars, draw_inline, draw_png

PHONE = 390 - 2 * 16 - 2 * 13  # pixels inside a figure
NAME = "<script>alert(1)</script>\"'&"


def labels_of(svg: str) -> list[str]:
    """The labels of all marks, as a screen reader reads them."""
    marks = ElementTree.fromstring(svg).iter()
    return [mark.get("aria-label") for mark in marks if "graphics-symbol" in mark.get("role", "")]


def size_of(svg: str) -> tuple[float, float]:
    root = ElementTree.fromstring(svg)
    return float(root.get("width")), float(root.get("height"))


@pytest.mark.parametrize("count", [1, 5, 40])
def test_bars_fit_a_phone(count):
    bars = [Bar(f"arm {number}", number, "the value in words") for number in range(count)]
    width, _ = size_of(draw_inline(draw_bars(bars, "number", (0, 40)), "bars"))
    assert width <= PHONE


def test_names_are_escaped_in_labels_and_texts():
    chart = draw_bars([Bar(NAME, 0.5, NAME, accent=True, low=0.4, high=0.6)], NAME)
    inline = draw_inline(chart, NAME)
    assert "<script" not in inline
    assert labels_of(inline) == [f"{NAME}: {NAME}"]
    assert draw_png(chart, NAME).startswith(b"\x89PNG")


def test_colours_of_text_are_those_of_the_page():
    drawn = draw_inline(draw_bars([Bar("one", 1.0, "1")], "number"), "bars")
    assert "currentColor" in drawn
    assert "white" not in drawn
