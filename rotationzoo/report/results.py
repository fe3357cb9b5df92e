"""The section of a page on what rotations keep and cost: answers and perplexity, and the tables of
the evaluation."""

from rotationzoo.artifact.scores import RecallDetails
from rotationzoo.report.arms import EXACT, Arms
from rotationzoo.report.charts import Bar, draw_bars
from rotationzoo.report.conditions import describe_conditions
from rotationzoo.report.figures import Figure, Section
from rotationzoo.report.tables import Table, evaluation_tables
from rotationzoo.words import change, counted, percent, perplexity

DECISION = "What it keeps, and what it costs"
ANSWERED = "answers"
"""The name of the picture that a card shows, too."""


def describe_decision(arms: Arms) -> Section:
    """The first section: answers, cost and bits of every arm, and the verdict."""
    evaluation = arms.evaluation
    named = {}
    for arm in arms.shown:
        # The verdict calls an arm by its name, and the pictures by its label.
        label = arm.label if arm.label == arm.name else f"{arm.label} [{arm.name}]"
        named[label] = arm.figures
    tables = evaluation_tables(evaluation, evaluation.window.model_copy(update={"arms": named}))
    words, pictures = evaluation.window.verdict.words, [_draw_perplexity(arms)]
    if answers := _draw_answers(arms):
        pictures.insert(0, answers)
    return Section(
        "decide",
        DECISION,
        [describe_conditions(evaluation)],
        pictures,
        tables,
        [*words[3:], *arms.notes],
        lead=" ".join(words[:3]),
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
    return Figure(ANSWERED, chart, Table(title, columns, rows))


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
