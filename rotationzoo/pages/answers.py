"""The sections on answers: how many each arm gives, and at which distance and depth."""

from collections import defaultdict
from math import log2

from rotationzoo.artifact.evaluation_file import Summary
from rotationzoo.charts.bars import Bar, draw_bars
from rotationzoo.charts.heat_maps import Cell, Colours, draw_map
from rotationzoo.pages.arms import EXACT, Arms
from rotationzoo.pages.conditions import describe_conditions
from rotationzoo.pages.cost import draw_perplexity
from rotationzoo.pages.figures import Figure, Section, Table, number, percent
from rotationzoo.simulation.size import EXACT_BITS

DECISION = "What it keeps, and what it costs"
_ABOUT = (
    "Questions about statements hidden in the text, which an arm reads from the 2-bit part of its "
    "cache. Only questions of tasks that the exact model can do are counted."
)


def describe_decision(arms: Arms) -> Section:
    """The first section: answers, cost and bits of every arm, and the verdict."""
    evaluation = arms.evaluation
    rows = [
        _row(
            EXACT,
            evaluation.exact.all_tasks,
            f"{evaluation.exact.perplexity:.3f}",
            None,
            EXACT_BITS,
        )
    ]
    for arm in arms.shown:
        figures = arm.figures
        named = arm.label if arm.label == arm.name else f"{arm.label} [{arm.name}]"
        rows.append(
            _row(
                named,
                figures.all_tasks,
                f"{figures.perplexity:.3f}",
                figures.perplexity_increase,
                figures.bits_per_element,
            )
        )
    columns = ["", "answered", "questions", "log probability", "perplexity", "cost", "bits"]
    verdict, pictures = evaluation.window.verdict.words, [draw_perplexity(arms)]
    if answers := draw_answers(arms):
        pictures.insert(0, answers)
    return Section(
        "decide",
        DECISION,
        [describe_conditions(evaluation)],
        pictures,
        Table(columns, rows),
        [*verdict[1:], *arms.notes],
        lead=verdict[0] if verdict else "",
    )


def _row(
    name: str, score: Summary | None, perplexity: str, cost: float | None, bits: float | None
) -> list[str]:
    answers = ["-", "-", "-"]
    if score is not None:
        answers = [str(score.answered), str(score.questions), f"{score.log_probability:.2f}"]
    loss = "-" if cost is None else f"{cost:+.2%}"
    return [name, *answers, perplexity, loss, number(bits, ".4g")]


def draw_answers(arms: Arms) -> Figure | None:
    """The share of questions that each arm answers, as bars; None if no question was asked."""
    scores = {EXACT: arms.evaluation.exact.all_tasks}
    scores |= {arm.label: arm.figures.all_tasks for arm in arms.shown}
    own_labels = {arm.label for arm in arms.shown if arm.is_own}
    bars, rows = [], []
    for label, score in scores.items():
        if score is None:
            continue
        share = score.answered / score.questions
        error = score.standard_error.get("answered")
        words = f"{score.answered} of {score.questions}"
        low, high = (None, None) if not error else (max(0, share - error), min(1, share + error))
        bars.append(Bar(label, share, words, label in own_labels, low, high))
        rows.append([label, str(score.answered), str(score.questions), percent(share, 1),
                     percent(error, 1)])  # fmt: skip
    if not bars:
        return None
    columns = ["", "answered", "questions", "share", "standard error"]
    chart = draw_bars(bars, "share of questions answered", (0, 1), "~%")
    title = "Questions answered (± one standard error over prompts)"
    return Figure("answers", title, chart, Table(columns, rows))


def describe_needles(arms: Arms) -> Section:
    """Answers by distance and depth, a heat map for each arm."""
    title = "Answers by distance and depth"
    summaries = {EXACT: arms.evaluation.exact.all_tasks}
    summaries |= {arm.label: arm.figures.all_tasks for arm in arms.shown}
    figures = []
    for count, (label, summary) in enumerate(summaries.items()):
        if summary is not None and summary.by_cell:
            figures.append(_draw_needles(f"needles-{count}", label, summary))
    if not figures:
        lacking = "The stored evaluation has no answers by distance and depth together."
        if not any(summaries.values()):
            lacking = "The stored evaluation asked no questions that the exact model can answer."
        return Section("needles", title, [lacking, "Evaluate again to see this, with --save."])
    about = (
        "Distance: tokens between a statement and its answer. Depth: where in the prompt the "
        "statement stands; 0% is the start. All maps have the same colours, from none to all of "
        "the questions; the numbers in a cell are questions answered of those asked."
    )
    return Section("needles", title, [_ABOUT, about], figures)


def _draw_needles(name: str, label: str, summary: Summary) -> Figure:
    # Several lengths of prompts may have questions at the same distance and depth.
    answered: dict[tuple[tuple[int, int], tuple[float, float]], int] = defaultdict(int)
    asked: dict[tuple[tuple[int, int], tuple[float, float]], int] = defaultdict(int)
    for cell in summary.by_cell or []:
        place = (cell.distance_from, cell.distance_to), (cell.depth_from, cell.depth_to)
        answered[place] += cell.answered
        asked[place] += cell.questions
    distances = sorted({distance for distance, _ in asked})
    depths = sorted({depth for _, depth in asked})
    cells, rows = [], []
    for depth in depths:
        row = [f"{depth[0]:.0%} to {depth[1]:.0%}"]
        for distance in distances:
            count, questions = answered[distance, depth], asked[distance, depth]
            where = f"distance {distance[0]:,} to {distance[1]:,}, depth {row[0]}"
            words = f"{count} of {questions}" if questions else "none asked"
            share, text = (count / questions, f"{count}/{questions}") if questions else (None, "")
            described = f"{label}, {where}: {words}"
            cells.append(Cell(_short(distance[0]), row[0], share, described, text))
            row.append(words)
        rows.append(row)
    columns = ["depth", *[f"{start:,} to {end:,}" for start, end in distances]]
    colours = Colours("share answered", 0, 1, percent=True)
    chart = draw_map(cells, "distance from, in tokens", "depth", colours)
    return Figure(name, label, chart, Table(columns, rows))


def _short(tokens: int) -> str:
    """A power of two in thousands, as 8K."""
    if tokens >= 1024 and log2(tokens).is_integer():
        return f"{tokens // 1024}K"
    return str(tokens)
