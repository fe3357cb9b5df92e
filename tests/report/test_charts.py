"""Charts: what they draw, whatever the number of layers and heads, and whatever the names."""

from xml.etree import ElementTree

import altair
import pytest
from jsonschema.exceptions import ValidationError

from rotationzoo.report.charts import (
    Axes,
    Bar,
    Cell,
    Colours,
    Point,
    draw_bars,
    draw_bundle,
    draw_inline,
    draw_lines,
    draw_map,
    draw_png,
    draw_svg,
)

PHONE = 390 - 2 * 16 - 2 * 13  # pixels inside a figure
NAME = "<script>alert(1)</script>\"'&"


def labels_of(svg: str) -> list[str]:
    """The labels of all marks, as a screen reader reads them."""
    marks = ElementTree.fromstring(svg).iter()
    return [mark.get("aria-label") for mark in marks if "graphics-symbol" in mark.get("role", "")]


def size_of(svg: str) -> tuple[float, float]:
    root = ElementTree.fromstring(svg)
    return float(root.get("width")), float(root.get("height"))


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (4, 2), (12, 1), (64, 8), (126, 8), (2, 64)])
def test_a_map_of_any_model_fits_a_phone(layers, heads):
    cells = [
        Cell(str(head), str(layer), 0.01 * (layer + head), f"layer {layer}, head {head}")
        for layer in range(layers)
        for head in range(heads)
    ]
    colours = Colours.of([cell.value for cell in cells], "attention KL")
    svg = draw_inline(draw_map(cells, "KV head", "layer", colours), "a map", "chart")
    width, height = size_of(svg)
    assert width <= PHONE
    assert height <= 620
    assert sorted(labels_of(svg)) == sorted(cell.label for cell in cells)


def test_altair_accepts_what_is_drawn_unchecked():
    charts = [
        draw_bars([Bar("one", 1.0, "1", low=0.5, high=1.5)], "number", (0, 2), "~%"),
        draw_map([Cell("0", "1", None, "none"), Cell("0", "2", 1.0, "one", "1")], "head", "layer",
                 Colours("KL", 0.1, 1, "log", percent=True)),
        draw_lines([Point("a", 1, 2.0, "two")], Axes("x", "y", y_scale="log", percent=True)),
        draw_lines([Point("a", "1", 2.0, "two")], Axes("x", "y", x_type="ordinal")),
        draw_bundle([Point("0", 1, 2.0, "two")], Axes("x", "y", x_scale="log"), "layer"),
    ]  # fmt: skip
    for chart in charts:
        altair.Chart.from_dict(chart)  # raises for what its schema does not have
        with pytest.raises(ValidationError):
            altair.Chart.from_dict({**chart, "width": "wide"})


def test_sparse_layers_have_rows_of_their_numbers_alone():
    cells = [Cell("0", str(layer), 1.0 + layer, f"layer {layer}") for layer in (3, 7, 11)]
    cells.append(Cell("1", "3", None, "not measured"))
    svg = draw_inline(draw_map(cells, "KV head", "layer", Colours("KL", 0, 12)), "a map", "chart")
    assert labels_of(svg) == ["layer 3", "layer 7", "layer 11", "not measured"]


def test_columns_and_rows_keep_their_order_whatever_was_measured():
    cells = [
        Cell(column, row, None if (column, row) == ("1st", "a") else 1.0, f"{column}{row}")
        for row in "ab"
        for column in ("1st", "2nd", "3rd")
    ]
    svg = draw_inline(draw_map(cells, "column", "row", Colours("KL", 0, 2)), "a map", "chart")
    texts = [text.text for text in ElementTree.fromstring(svg).iter() if text.tag.endswith("text")]
    assert [text for text in texts if text in ("1st", "2nd", "3rd")] == ["1st", "2nd", "3rd"]
    assert [text for text in texts if text in ("a", "b")] == ["a", "b"]


def test_names_are_escaped_in_labels_texts_and_titles():
    chart = draw_bars([Bar(NAME, 0.5, NAME, accent=True, low=0.4, high=0.6)], NAME)
    inline, file = draw_inline(chart, NAME, "chart"), draw_svg(chart, NAME).decode()
    assert "<script" not in inline + file
    assert labels_of(inline) == [f"{NAME}: {NAME}"]
    assert labels_of(file) == [f"{NAME}: {NAME}", f"Title text '{NAME}'"]
    assert draw_png(chart, NAME).startswith(b"\x89PNG")


def test_colours_of_text_are_those_of_the_page_and_files_are_black_on_white():
    chart = draw_bars([Bar("one", 1.0, "1")], "number")
    assert "currentColor" in draw_inline(chart, "bars", "chart")
    assert "white" not in draw_inline(chart, "bars", "chart")
    assert 'fill="white"' in draw_svg(chart, "bars").decode()


def test_lines_differ_in_dashes_and_shapes_and_have_a_label_for_each_point():
    points = [
        Point(f"line {line}", x, line + x, f"line {line} at {x}")
        for line in range(5)
        for x in (1, 2, 3)
    ]
    svg = draw_inline(draw_lines(points, Axes("layer", "value")), "lines", "chart")
    assert sorted(labels_of(svg)) == sorted(point.label for point in points)
    assert len({part.split('"')[0] for part in svg.split('stroke-dasharray="')[1:]}) >= 5
    assert size_of(svg)[0] <= PHONE


def test_a_bundle_has_one_label_for_each_line():
    points = [Point(str(layer), x, 1 / x, f"layer {layer}") for layer in (0, 9) for x in (1, 8)]
    svg = draw_inline(draw_bundle(points, Axes("direction", "share"), "layer"), "spectra", "chart")
    assert labels_of(svg) == ["layer 0", "layer 9"]


@pytest.mark.parametrize(
    ("values", "scale"),
    [([0.1, 0.2], (0, 0.2, "linear")), ([0.0, 9.0], (0, 9, "linear")),
     ([0.01, 1.0], (0.01, 1, "log")), ([1e-9, 1.0], (1e-4, 1, "log")),
     ([0.0], (0, 1, "linear")), ([], (0, 1, "linear"))],
)  # fmt: skip
def test_colours_are_logarithmic_for_values_that_are_far_apart(values, scale):
    colours = Colours.of(values, "KL")
    assert (colours.low, colours.high, colours.type) == scale
