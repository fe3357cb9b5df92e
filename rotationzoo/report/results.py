"""The sections of a page on what rotations keep and cost: the verdict with its chart, and the
tables of the evaluation."""

from collections.abc import Iterable

from rotationzoo.report.arms import EXACT, Arms
from rotationzoo.report.charts import Point, draw_answers
from rotationzoo.report.conditions import describe_conditions, list_caveats, list_exact_parts
from rotationzoo.report.figures import Figure, Section
from rotationzoo.report.memory import Request
from rotationzoo.report.tables import evaluation_tables, share_words
from rotationzoo.simulation.size import EXACT_BITS
from rotationzoo.words import numbers, percent

VERDICT = "Verdict"
_UNDECIDED = "ask", "nothing"


def describe_verdict(arms: Arms, request: Request, layers: Iterable[int] = ()) -> Section:
    """The first section: what to do and why, the memory that it saves, and the chart.

    `layers`: all that have a cache, if they are known.
    """
    measured = arms.evaluation
    decision = arms.decision
    reasons, lead = list(measured.window.verdict.words), ""
    if decision is not None and decision.words:
        *reasons, lead = decision.words
        lead = f"Undecided. {lead}" if decision.action in _UNDECIDED else lead
    if arms.chosen is not None:
        reasons.append(request.describe_saving(request.arm_bits(arms.chosen, measured)))
    reasons += list_exact_parts(measured, layers)
    if arms.left_out:
        reasons.append(f"Not in the chart: {', '.join(arms.left_out)}.")
    return Section(
        anchor="verdict",
        title=VERDICT,
        lead=lead,
        words=reasons,
        figure=_draw_answers(arms, request),
    )


def describe_measurement(arms: Arms) -> Section:
    """How the evaluation was run, and all of its tables."""
    measured = arms.evaluation
    named = {}
    for label, arm in arms.shown.items():
        # The comparisons of the verdict call a baseline by its name in the evaluation.
        is_named = label.lower() == arm.name.lower()
        named[label if is_named else f"{label} [{arm.name}]"] = arm
    window = measured.window.model_copy(update={"arms": named})
    return Section(
        anchor="measured",
        title="How it was measured, in numbers",
        words=[describe_conditions(measured)],
        tables=evaluation_tables(measured, window),
        listed=list_caveats(measured),
    )


def _draw_answers(arms: Arms, request: Request) -> Figure | None:
    """The share of questions that is answered from each cache, over its memory; None if no question
    was asked, or the exact model can answer none."""
    measured = arms.evaluation
    exact, decision = measured.exact.all_tasks, arms.decision
    if exact is None or not exact.answered:
        return None
    scale, unit = request.scale
    best = exact.share
    points = [Point(EXACT, EXACT_BITS * scale, best, percent(best))]
    for label, arm in arms.shown.items():
        if (recall := arm.all_tasks) is None:
            continue
        is_chosen, interval = arm is arms.chosen, None
        share = min(recall.share, best)
        if is_chosen and decision is not None and decision.interval and decision.kept:
            # The decision's interval is of the answers that are kept, in whose place all stand.
            low, high = (end * share / decision.kept for end in decision.interval)
            interval = low, min(high, 1.0)
        percents = share_words(recall, best)
        if recall.questions < exact.questions:
            percents += f" of {recall.questions}"
        point = Point(
            name=label,
            memory=request.arm_bits(arm, measured) * scale,
            share=share,
            percent=percents,
            accent=is_chosen,
            interval=interval,
        )
        points.append(point)
    title = f"Questions answered (prompts of {numbers(measured.tasks.lengths)} tokens)"
    return Figure(title, draw_answers(points, unit))
