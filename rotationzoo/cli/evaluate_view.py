"""The output of `evaluate`: the decision on each artifact, and behind `--details` all tables."""

from collections.abc import Sequence
from pathlib import Path

from rotationzoo.artifact.measured import Measured, Window
from rotationzoo.artifact.scores import Decision
from rotationzoo.cli.command_line import retyped
from rotationzoo.cli.output import Output, say, show_table
from rotationzoo.report.commands import decided_words
from rotationzoo.report.conditions import (
    ABOUT_BITS,
    describe_arms,
    describe_drift,
    describe_prefill,
    describe_recall,
)
from rotationzoo.report.tables import evaluation_tables
from rotationzoo.words import counted


def show_evaluation(out: Output, report: Measured, details: bool = False) -> None:
    """Print the decision on each artifact, with `details` after all tables. Without artifacts there
    are tables alone."""
    notes = report.notes
    # What was picked for an engine is the first note: of interest where something is lost.
    if report.engine and not details and notes[0].endswith("Lost: nothing"):
        notes = [f"simulated as {report.engine} serves it", *notes[1:]]
    out.notes(notes)
    names = "\n".join(report.window.arms)
    out.result(report.report(), names, lambda: _say_evaluation(report, details))


def suggest_next(
    out: Output,
    decisions: Sequence[Decision],
    model: list[str],
    artifacts: list[Path],
    saved: bool,
    seed: int = 0,
    engine: str | None = None,
) -> None:
    """Suggest what the decision on the first of these artifacts calls for.

    - `model`: its name and, if the user gave one, the option for its revision;
    - `seed`: of the questions that were asked. New ones need another;
    - `engine`: that the user named.
    """
    served = ["--for", engine] if engine else []
    if not artifacts:
        out.suggest("calibrate", *model, *served)
        return
    more = decisions[0].more_questions
    if more is not None:
        out.suggest(*retyped({"--questions": str(more), "--seed": str(seed + 1)}))
    elif words := decided_words(decisions[0], model, str(artifacts[0]), served):
        out.suggest(*words)
    elif saved:
        out.suggest("report", str(artifacts[0]))
    else:
        named = ["--rotations", str(artifacts[0])]
        prompt = [] if model == ["demo"] else ["--prompt", "TEXT"]
        out.suggest("generate", *model, *named, *served, "--compare", *prompt)


def _say_evaluation(report: Measured, details: bool) -> None:
    if details or not report.window.verdict.decisions:
        _say_details(report)
    for window in report.windows:
        if len(report.windows) > 1:
            say(f"With {_title(window)}:")
        say(*window.verdict.words)
    say(*describe_drift(report))


def _say_details(report: Measured) -> None:
    tokens = f"{counted(report.tokens, 'token')} from position {report.first_position} on"
    text = f"{tokens} in {counted(report.text.rows, 'text')}"
    exact = f"exact perplexity {report.exact.perplexity:.4f}"
    say(f"{report.model}, {text}, format {report.format}{describe_prefill(report)}; {exact}")
    for number, window in enumerate(report.windows):
        if number:
            say("")
        say(_title(window))
        for table in evaluation_tables(report, window):
            show_table(table, apart=True)
    say("")
    say(*describe_recall(report))
    say("±: standard error over texts, paired with the exact model")
    say(f"{ABOUT_BITS}; bits here: at {report.text.length:,}")
    say(*describe_arms(report.window.arms.values()))
    say("")


def _title(window: Window) -> str:
    return f"sink {window.sink}, recent {window.recent}"
