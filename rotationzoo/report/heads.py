"""The sections on layers and KV heads: attention KL, output error, and the ranges of rows."""

from statistics import fmean

from rotationzoo.report.arms import Arms, ShownArm
from rotationzoo.report.charts import Axes, Colours
from rotationzoo.report.figures import Section, draw_by_layer, map_heads

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
    anchor, maps = measure.replace("_", "-"), {}
    for count, arm in enumerate(arms.shown):
        maps[f"{anchor}-{count}"] = arm.label, _by_head(arm, measure)
    known: list[float] = []
    for _, by_layer in maps.values():
        known += [value for heads in by_layer.values() for value in heads if value is not None]
    if not known:
        return Section(anchor, heading, ["The stored evaluation has no figures by head.", AGAIN])
    colours = Colours.of(known, scale)
    figures = []
    for name, (label, by_layer) in maps.items():
        if any(value is not None for heads in by_layer.values() for value in heads):
            figures.append(map_heads((name, label), label, by_layer, colours))
    return Section(anchor, heading, [f"{about} All maps have the same colours."], figures)


def _by_head(arm: ShownArm, measure: str) -> dict[int, list[float | None]]:
    """Layer -> the values of its KV heads."""
    return {layer.layer: getattr(layer.heads, measure) for layer in arm.figures.by_layer}


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
            axes = Axes("layer", "range / RMS", from_zero=False)
            words = f"range of {side} {{:.3g}} times the RMS"
            title_of_side = f"row-ranges-{side}", f"Row ranges of {side}"
            figures.append(draw_by_layer(title_of_side, measured, axes, words))
    if not figures:
        return Section("row-ranges", title, ["The stored evaluation has no row ranges.", AGAIN])
    return Section("row-ranges", title, [about], figures)


def _mean_by_layer(arm: ShownArm, measure: str) -> dict[int, float]:
    means = {}
    for layer, heads in _by_head(arm, measure).items():
        values = [value for value in heads if value is not None]
        if values:
            means[layer] = fmean(values)
    return means
