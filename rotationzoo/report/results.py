"""The sections of a page on what rotations keep and cost: answers, by distance and depth too, and
perplexity, with its growth over the context."""

from collections import defaultdict

from rotationzoo.artifact.scores import RecallDetails
from rotationzoo.report.arms import EXACT, Arms
from rotationzoo.report.charts import (
    Axes,
    Bar,
    Cell,
    Colours,
    Point,
    draw_bars,
    draw_lines,
    draw_map,
)
from rotationzoo.report.conditions import describe_conditions
from rotationzoo.report.figures import Figure, Section
from rotationzoo.report.tables import Table, cost_table, recall_tables
from rotationzoo.words import UNKNOWN, change, counted, number, percent, perplexity, power_of_two

DECISION = "What it keeps, and what it costs"
_ABOUT = (
    "Questions about statements hidden in the text, which an arm reads from the 2-bit part of its "
    "cache. Only questions of tasks that the exact model can do are counted."
)


def describe_decision(arms: Arms) -> Section:
    """The first section: answers, cost and bits of every arm, and the verdict."""
    evaluation = arms.evaluation
    named = {}
    for arm in arms.shown:
        # The verdict calls an arm by its name, and the pictures by its label.
        label = arm.label if arm.label == arm.name else f"{arm.label} [{arm.name}]"
        named[label] = arm.figures
    exact = evaluation.exact
    tables = [*recall_tables(exact.tasks, exact.all_tasks, named), cost_table(named)]
    words, pictures = evaluation.window.verdict.words, [_draw_perplexity(arms)]
    if answers := _draw_answers(arms):
        pictures.insert(0, answers)
    return Section(
        "decide",
        DECISION,
        [describe_conditions(evaluation)],
        pictures,
        tables,
        [*words[1:], *arms.notes],
        lead=words[0] if words else "",
    )


def _recalls(arms: Arms) -> dict[str, RecallDetails]:
    """The answers of the exact model and of every arm that was asked, by label."""
    recalls = {EXACT: arms.evaluation.exact.all_tasks}
    recalls |= {arm.label: arm.figures.all_tasks for arm in arms.shown}
    return {label: recall for label, recall in recalls.items() if recall is not None}


def _draw_answers(arms: Arms) -> Figure | None:
    """The share of questions that each arm answers, as bars; None if no question was asked."""
    own_labels = {arm.label for arm in arms.shown if arm.is_own}
    bars, rows = [], []
    for label, recall in _recalls(arms).items():
        share, error = recall.share, recall.standard_error.get("answered")
        words = f"{recall.answered} of {recall.questions}"
        low, high = (None, None) if not error else (max(0, share - error), min(1, share + error))
        bars.append(Bar(label, share, words, label in own_labels, low, high))
        counts = [str(recall.answered), str(recall.questions)]
        rows.append([label, *counts, percent(share, 1), percent(error, 1)])
    if not bars:
        return None
    columns = ["", "answered", "questions", "share", "standard error"]
    chart = draw_bars(bars, "share of questions answered", (0, 1), "~%")
    title = "Questions answered (± one standard error over prompts)"
    return Figure("answers", chart, Table(title, columns, rows))


def describe_needles(arms: Arms) -> Section:
    """Answers by distance and depth, a heat map for each arm."""
    title = "Answers by distance and depth"
    figures = []
    for count, (label, recall) in enumerate(_recalls(arms).items()):
        figures.append(_draw_needles(f"needles-{count}", label, recall))
    if not figures:
        lacking = "The stored evaluation asked no questions that the exact model can answer."
        return Section("needles", title, [lacking, "Evaluate again to see this, with --save."])
    about = (
        "Distance: tokens between a statement and its answer. Depth: where in the prompt the "
        "statement stands; 0% is the start. All maps have the same colours, from none to all of "
        "the questions; the numbers in a cell are questions answered of those asked."
    )
    return Section("needles", title, [_ABOUT, about], figures)


def _draw_needles(name: str, label: str, recall: RecallDetails) -> Figure:
    # Several lengths of prompts may have questions at the same distance and depth.
    answered: dict[tuple[tuple[int, int], tuple[float, float]], int] = defaultdict(int)
    asked: dict[tuple[tuple[int, int], tuple[float, float]], int] = defaultdict(int)
    for cell in recall.by_cell:
        place = (cell.distance_from, cell.distance_to), (cell.depth_from, cell.depth_to)
        answered[place] += cell.answered
        asked[place] += cell.questions
    distances = sorted({distance for distance, _ in asked})
    depths = sorted({depth for _, depth in asked})
    cells, rows = [], []
    for depth in depths:
        row = [f"{percent(depth[0])} to {percent(depth[1])}"]
        for distance in distances:
            count, questions = answered[distance, depth], asked[distance, depth]
            where = f"distance {distance[0]:,} to {distance[1]:,}, depth {row[0]}"
            words = f"{count} of {questions}" if questions else "none asked"
            share, text = (count / questions, f"{count}/{questions}") if questions else (None, "")
            described = f"{label}, {where}: {words}"
            cells.append(Cell(power_of_two(distance[0]), row[0], share, described, text))
            row.append(words)
        rows.append(row)
    columns = ["depth", *[f"{start:,} to {end:,}" for start, end in distances]]
    colours = Colours("share answered", 0, 1, percent=True)
    chart = draw_map(cells, "distance from, in tokens", "depth", colours)
    return Figure(name, chart, Table(label, columns, rows))


def _draw_perplexity(arms: Arms) -> Figure:
    """The increase of perplexity of every arm as bars, with standard errors over texts."""
    texts = arms.evaluation.window.verdict.texts
    precision = "a single text, without standard errors"
    if texts > 1:
        precision = f"± one standard error over {counted(texts, 'text')}"
    bars, rows = [], []
    for arm in arms.shown:
        cost = arm.figures.perplexity_increase
        error = arm.figures.standard_error.get("perplexity_increase")
        low, high = (None, None) if error is None else (cost - error, cost + error)
        bars.append(Bar(arm.label, cost, change(cost, error=error), arm.is_own, low, high))
        figures = [perplexity(arm.figures.perplexity), change(cost, 3), percent(error, 3)]
        rows.append([arm.label, *figures])
    columns = ["", "perplexity", "increase", "standard error"]
    chart = draw_bars(bars, "increase over the exact model", format="~%")
    return Figure(
        "perplexity", chart, Table(f"Increase of perplexity ({precision})", columns, rows)
    )


def describe_growth(arms: Arms) -> Section:
    """How perplexity and attention KL grow with the length of the context."""
    title = "Growth with the length of the context"
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
                lines.append([positions, *[row.get(label, UNKNOWN) for label in columns[1:]]])
            table = Table(words, columns, lines)
            name = f"growth-{measure.replace('_', '-')}"
            figures.append(Figure(name, draw_lines(points, axes), table))
    return Section("growth", title, [about], figures)
