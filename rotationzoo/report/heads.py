"""The sections on layers and KV heads: attention KL, output error, and the ranges of rows."""

from collections.abc import Sequence
from statistics import fmean

from rotationzoo.artifact.measured import LayerMeasures
from rotationzoo.report.arms import Arms, ShownArm
from rotationzoo.report.charts import Axes, Cell, Colours, Point, draw_lines, draw_map
from rotationzoo.report.figures import Figure, Section
from rotationzoo.report.tables import Table, pad
from rotationzoo.words import number

AGAIN = "Evaluate again to see this: rotationzoo evaluate MODEL ARTIFACT --save"
_MEASURES = {
    "attention_kl": ("attention KL", "attention KL, in nats"),
    "output_error": ("output error", "relative error of the head's output"),
}
_SIDES = {"key_row_range": "keys", "value_row_range": "values"}


def describe_heads(arms: Arms) -> list[Section]:
    """A section for each measure, with a map of layers and KV heads for every arm."""
    about = {
        "attention_kl": "How far attention moves from the exact one: the Kullback-Leibler "
        "divergence in nats, the mean over sampled queries of the heads that read a KV head.",
        "output_error": "How far the outputs of attention move, before the output projection: the "
        "root of their squared errors over their squares, of the heads that read a KV head.",
    }
    return [_describe_measure(arms, measure, about[measure]) for measure in _MEASURES]


def _describe_measure(arms: Arms, measure: str, about: str) -> Section:
    title, scale = _MEASURES[measure]
    heading = f"{title.capitalize()} by layer and KV head"
    if measure == "attention_kl":
        heading = "Attention KL by layer and KV head"
    values: list[float] = []
    for arm in arms.shown:
        values += [value for value in _all_values(arm, measure) if value is not None]
    anchor = measure.replace("_", "-")
    if not values:
        return Section(anchor, heading, ["The stored evaluation has no figures by head.", AGAIN])
    colours = Colours.of(values, scale)
    figures = []
    for count, arm in enumerate(arms.shown):
        if any(value is not None for value in _all_values(arm, measure)):
            figures.append(_draw_heads(f"{anchor}-{count}", arm, measure, colours))
    return Section(anchor, heading, [f"{about} All maps have the same colours."], figures)


def _by_head(layer: LayerMeasures, measure: str) -> list[float | None]:
    """The values of one layer, a number per KV head."""
    values: list[float | None] = getattr(layer.heads, measure)
    return values


def _all_values(arm: ShownArm, measure: str) -> list[float | None]:
    values: list[float | None] = []
    for layer in arm.figures.by_layer:
        values += _by_head(layer, measure)
    return values


def _draw_heads(name: str, arm: ShownArm, measure: str, colours: Colours) -> Figure:
    cells, rows = [], []
    for layer in arm.figures.by_layer:
        row = [str(layer.layer)]
        for head, value in enumerate(_by_head(layer, measure)):
            words = number(value) if value is not None else "not measured"
            label = f"{arm.label}, layer {layer.layer}, KV head {head}: {words}"
            cells.append(Cell(str(head), str(layer.layer), value, label))
            row.append(number(value))
        rows.append(row)
    padded = pad(rows)
    columns = ["layer", *[f"head {head}" for head in range(len(padded[0]) - 1)]]
    chart = draw_map(cells, "KV head", "layer", colours)
    return Figure(name, chart, Table(arm.label, columns, padded))


def describe_ranges(arms: Arms) -> Section:
    """The ranges of rows that are rounded, before and after rotation."""
    title = "Row ranges, before and after"
    about = (
        "What a quantizer has to cover with four values: the largest minus the smallest entry of a "
        "row, before it is clipped, relative to the row's root mean square, in the coordinates in "
        "which it is rounded; the mean over KV heads and all rows past the first exact tokens. The "
        "line of no rotation is before. Keys that are not rounded row by row have no line."
    )
    figures = []
    for measure, side in _SIDES.items():
        lines = {arm.label: _mean_by_layer(arm, measure) for arm in arms.shown}
        measured = {label: line for label, line in lines.items() if line}
        if measured:
            figures.append(_draw_ranges(side, measured))
    if not figures:
        return Section("row-ranges", title, ["The stored evaluation has no row ranges.", AGAIN])
    return Section("row-ranges", title, [about], figures)


def _mean_by_layer(arm: ShownArm, measure: str) -> dict[int, float]:
    means = {}
    for layer in arm.figures.by_layer:
        values = [value for value in _by_head(layer, measure) if value is not None]
        if values:
            means[layer.layer] = fmean(values)
    return means


def _draw_ranges(side: str, lines: dict[str, dict[int, float]]) -> Figure:
    points = []
    for label, line in lines.items():
        for layer, value in line.items():
            words = f"{label}, layer {layer}: range of {side} {value:.3g} times the RMS"
            points.append(Point(label, layer, value, words))
    layers = sorted({layer for line in lines.values() for layer in line})
    rows = [_row(layer, list(lines.values())) for layer in layers]
    chart = draw_lines(points, Axes("layer", "range / RMS", from_zero=False))
    table = Table(f"Row ranges of {side}", ["layer", *lines], rows)
    return Figure(f"row-ranges-{side}", chart, table)


def _row(layer: int, lines: Sequence[dict[int, float]]) -> list[str]:
    return [str(layer), *[number(line.get(layer)) for line in lines]]
