"""The sections of a page on what rotations keep and cost: the verdict with its chart, and the
tables of the evaluation."""

from collections.abc import Iterable

from rotationzoo.artifact.scores import kept_share
from rotationzoo.codec.size import EXACT_BITS
from rotationzoo.report.arms import EXACT, Arms
from rotationzoo.report.charts import Point, draw_answers
from rotationzoo.report.conditions import describe_conditions, list_caveats, list_exact_parts
from rotationzoo.report.figures import Figure, Section
from rotationzoo.report.memory import Request
from rotationzoo.report.tables import evaluation_tables
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
    """The share of the exact model's answers that each cache keeps, over its memory; None if no
    question was asked, or the exact model can answer none."""
    measured = arms.evaluation
    exact, decision = measured.exact.all_tasks, arms.decision
    if exact is None or not exact.answered:
        return None
    scale, unit = request.scale
    points = [Point(EXACT, EXACT_BITS * scale, 1.0, percent(1.0))]
    for label, arm in arms.shown.items():
        share = kept_share(measured.exact.tasks, arm.tasks)
        if share is None:
            continue
        is_chosen = arm is arms.chosen
        is_less = arm.all_tasks is not None and arm.all_tasks.questions < exact.questions
        interval = decision.interval if is_chosen and decision is not None else None
        point = Point(
            name=label,
            memory=request.arm_bits(arm, measured) * scale,
            share=share,
            percent=percent(share) + "*" * is_less,
            accent=is_chosen,
            interval=None if interval is None else (interval[0], interval[1]),
        )
        points.append(point)
    title = f"Answers that are kept (prompts of {numbers(measured.tasks.lengths)} tokens)"
    if any(point.percent.endswith("*") for point in points):
        title += "; *: of fewer questions"
    return Figure(title, draw_answers(points, unit))
