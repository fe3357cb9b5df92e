"""Predictions: what each arm adds to perplexity, and how the cost grows with the context."""

from rotationzoo.charts.bars import Bar, draw_bars
from rotationzoo.charts.lines import Axes, Point, draw_lines
from rotationzoo.pages.arms import Arms
from rotationzoo.pages.figures import Figure, Section, Table, number, percent
from rotationzoo.words import counted


def draw_perplexity(arms: Arms) -> Figure:
    """The increase of perplexity of every arm as bars, with standard errors over texts."""
    texts = arms.evaluation.window.verdict.texts or 1
    precision = "a single text, without standard errors"
    if texts > 1:
        precision = f"± one standard error over {counted(texts, 'text')}"
    bars, rows = [], []
    for arm in arms.shown:
        cost, error = (
            arm.figures.perplexity_increase,
            arm.figures.standard_error.get("perplexity_increase"),
        )
        words = f"{cost:+.2%}" if error is None else f"{cost:+.2%} ±{error:.2%}"
        low, high = (None, None) if error is None else (cost - error, cost + error)
        bars.append(Bar(arm.label, cost, words, arm.is_own, low, high))
        perplexity = f"{arm.figures.perplexity:.3f}"
        rows.append([arm.label, perplexity, f"{cost:+.3%}", percent(error, 3)])
    columns = ["", "perplexity", "increase", "standard error"]
    chart = draw_bars(bars, "increase over the exact model", format="~%")
    title = f"Increase of perplexity ({precision})"
    return Figure("perplexity", title, chart, Table(columns, rows))


def describe_growth(arms: Arms) -> Section:
    """How perplexity and attention KL grow with the length of the context."""
    title = "Growth with the length of the context"
    if not arms.own_arm.figures.by_length:
        return Section("growth", title, ["The stored evaluation has no figures by length."])
    about = (
        "Each point is for the tokens at these positions of the texts; it stands at the first of "
        "them. Attention KL is the mean over layers, heads and sampled queries there."
    )
    measures = {
        "perplexity_increase": ("Increase of perplexity", ".2%"),
        "attention_kl": ("Attention KL, in nats", ".4g"),
    }
    figures = []
    for measure, (words, format) in measures.items():
        points, columns = [], ["positions"]
        rows: dict[str, dict[str, str]] = {}
        for arm in arms.shown:
            columns.append(arm.label)
            for bucket in arm.figures.by_length:
                positions = f"{bucket.from_:,} to {bucket.to - 1:,}"
                value = getattr(bucket, measure)
                rows.setdefault(positions, {})[arm.label] = number(value, format)
                if value is not None:
                    label = f"{arm.label}, positions {positions}: {value:{format}}"
                    points.append(Point(arm.label, f"{bucket.from_:,}", value, label))
        if points:
            axes = Axes("position, from", words, x_type="ordinal", percent="%" in format)
            lines = []
            for positions, row in rows.items():
                lines.append([positions, *[row.get(label, "-") for label in columns[1:]]])
            table = Table(columns, lines)
            name = f"growth-{measure.replace('_', '-')}"
            figures.append(Figure(name, words, draw_lines(points, axes), table))
    return Section("growth", title, [about], figures)
