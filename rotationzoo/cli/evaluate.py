"""`rotationzoo evaluate`: measure what rotations cost a model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rotationzoo.cli.next_steps import check_is_model, named, retyped, served, suggest_text
from rotationzoo.cli.output import Output, say, table
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.settings import EvaluationSettings
from rotationzoo.settings_base import flag
from rotationzoo.words import counted, finish

if TYPE_CHECKING:
    from rotationzoo.artifact.measured import Measured
    from rotationzoo.artifact.scores import Decision


def evaluate_command(
    settings: EvaluationSettings,
    out: Output,
    details: bool = flag("Also print all tables, with explanations."),
) -> None:
    """Measure what a model keeps with rotations in 2 bits, and decide whether to serve them.

    rotationzoo evaluate demo rotations/demo-transform

    rotationzoo evaluate Qwen/Qwen3-8B rotations/Qwen3-8B-transform --for vllm
    """
    check_is_model(settings.model, "evaluate")
    for name, is_given in {"--save": settings.save, "--keep": settings.keep is not None}.items():
        if is_given and not settings.folders:
            hint = "name their folder after the model, or print the report with --json"
            raise UsageError(f"{name} is for rotations, and none are given", hint)
    from rotationzoo.api import evaluation_job
    from rotationzoo.evaluation.evaluate import evaluate

    job = evaluation_job(settings)
    with show_progress(out) as progress:
        report = evaluate(job, progress, out.tell)
    show_evaluation(out, report, details)
    suggest_next(out, report.window.verdict.decisions, settings)
    if settings.keep is not None:
        check_kept(report)


def check_kept(report: "Measured") -> None:
    """Raise `RotationZooError` unless every decision is to serve."""
    from rotationzoo.artifact.scores import plain_name

    decisions = [each for window in report.windows for each in window.verdict.decisions]
    if failed := [plain_name(each.arm) for each in decisions if each.action != "serve"]:
        kept = f"at least {100 * decisions[0].floor:g}% of the answers are kept"
        problem = f"nothing shows that {kept} by {', '.join(dict.fromkeys(failed))}"
        raise RotationZooError(problem, hint="see the decision above")


def show_evaluation(out: Output, report: "Measured", details: bool = False) -> None:
    """Print the decision on each artifact, and with `details` all tables before it."""
    out.notes(report.notes)

    def human() -> None:
        if details or not report.window.verdict.decisions:
            _say_details(report)
        for window in report.windows:
            if len(report.windows) > 1:
                say(f"With sink {window.sink}, recent {window.recent}:")
            say(*window.verdict.words)

    out.result(report.report(), "\n".join(report.window.arms), human)


def suggest_next(
    out: Output, decisions: Sequence["Decision"], settings: EvaluationSettings
) -> None:
    """Suggest the command that the decision on the first artifact calls for."""
    from rotationzoo.report.card import decided_words

    model, simulated = named(settings.model, settings.revision), served(settings.engine)
    if not settings.folders:
        out.suggest("calibrate", *model, *simulated)
        return
    decision, more, folder = decisions[0], decisions[0].more_questions, settings.folders[0]
    if decision.action == "ask" and more is not None:
        if decision.more_seconds is not None:
            out.tell(f"{more:,} new questions of each task{finish(decision.more_seconds)}")
        seed = str((settings.seed or 0) + 1)  # for new questions
        out.suggest(*retyped({"--minutes": "", "--questions": str(more), "--seed": seed}))
    elif words := decided_words(decision, model, str(folder), simulated):
        out.suggest(*words)
    elif settings.save:
        out.suggest("report", str(folder))
    else:
        suggest_text(out, folder, model, *simulated, "--compare")


def _say_details(report: "Measured") -> None:
    from rotationzoo.report import tables

    tokens = f"{counted(report.tokens, 'token')} from position {report.first_position} on"
    text = f"{tokens} in {counted(report.text.rows, 'text')}"
    exact = f"exact perplexity {report.exact.perplexity:.4f}"
    format = f"format {report.format}{tables.describe_prefill(report)}"
    say(f"{report.model}, {text}, {format}; {exact}")
    for number, window in enumerate(report.windows):
        say(*[""] * (number > 0), f"sink {window.sink}, recent {window.recent}")
        for each in tables.evaluation_tables(report, window):
            table(each.title, each.columns, each.rows, apart=True)
    say("", *tables.describe_recall(report))
    say("±: standard error over texts, paired with the exact model")
    say(f"{tables.ABOUT_BITS}; bits here: at {report.text.length:,}")
    say(*tables.describe_arms(report.window.arms.values()), "")
