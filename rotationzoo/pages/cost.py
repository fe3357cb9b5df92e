"""The sections on predictions: perplexity, and how the cost grows with the context."""

from rotationzoo.charts.bars import Bar, draw_bars
from rotationzoo.charts.lines import Axes, Point, draw_lines
from rotationzoo.pages.arms import Arms
from rotationzoo.pages.figures import Figure, Section, Table, number, percent
from rotationzoo.words import counted


def describe_perplexity(arms: Arms) -> Section:
    """The increase of perplexity of every arm, with standard errors."""
    texts = arms.evaluation.window.verdict.texts
    about = f"Perplexity of the exact model: {arms.evaluation.exact.perplexity:.4g}. "
    if texts is not None and texts > 1:
        about += f"The thin lines are one standard error over {counted(texts, 'text')}."
    else:
        about += "A single text gives no standard error."
    bars, rows = [], []
    for arm in arms.shown:
        cost, error = (
            arm.figures.perplexity_increase,
            arm.figures.standard_error.get("perplexity_increase"),
        )
        words = f"{cost:+.2%}" if error is None else f"{cost:+.2%} ±{error:.2%}"
        low, high = (None, None) if error is None else (cost - error, cost + error)
        bars.append(Bar(arm.label, cost, words, arm.own, low, high))
        perplexity = f"{arm.figures.perplexity:.4g}"
        rows.append([arm.label, perplexity, f"{cost:+.3%}", percent(error, 3)])
    columns = ["", "perplexity", "increase", "standard error"]
    chart = draw_bars(bars, "increase over the exact model", format="~%")
    figure = Figure("perplexity", "Increase of perplexity", chart, Table(columns, rows))
    return Section("perplexity", "Perplexity", [about], [figure])


def describe_growth(arms: Arms) -> Section:
    """How perplexity and attention KL grow with the length of the context."""
    title = "Growth with the length of the context"
    if not arms.own.figures.by_length:
        return Section("growth", title, ["The stored evaluation has no figures by length."])
    about = "Each point is for the tokens at these positions of a text, from their first."
    measures = {
        "perplexity_increase": ("Increase of perplexity", ".1%", ".2%"),
        "attention_kl": ("Attention KL, in nats", "~g", ".4g"),
    }
    figures = []
    for measure, (words, axis, format) in measures.items():
        points, columns = [], ["positions"]
        rows: dict[str, list[str]] = {}
        for arm in arms.shown:
            columns.append(arm.label)
            for bucket in arm.figures.by_length:
                positions = f"{bucket.from_:,} to {bucket.to:,}"
                value = getattr(bucket, measure)
                rows.setdefault(positions, [positions]).append(number(value, format))
                if value is not None:
                    label = f"{arm.label}, positions {positions}: {value:{format}}"
                    points.append(Point(arm.label, f"{bucket.from_:,}", value, label))
        if points:
            axes = Axes("position, from", words, x_type="ordinal", y_format=axis)
            table = Table(columns, list(rows.values()))
            name = f"growth-{measure.replace('_', '-')}"
            figures.append(Figure(name, words, draw_lines(points, axes), table))
    return Section("growth", title, [about], figures)
