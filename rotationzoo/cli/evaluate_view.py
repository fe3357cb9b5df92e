"""The output of `evaluate`: the tables of each pair of windows, and which arms clearly differ."""

from pathlib import Path

from rotationzoo.artifact.measured import Measured, Window
from rotationzoo.cli.output import Output, say, show_table
from rotationzoo.report.conditions import (
    ABOUT_BITS,
    describe_arms,
    describe_prefill,
    describe_recall,
)
from rotationzoo.report.tables import evaluation_tables
from rotationzoo.words import counted


def show_evaluation(out: Output, report: Measured) -> None:
    """Print the arms for each window: what they answer, and their perplexity increase by context
    length."""
    out.notes(report.notes)
    out.result(report.report(), "\n".join(report.window.arms), lambda: _say_evaluation(report))


def suggest_next(out: Output, model: list[str], artifacts: list[Path], saved: bool) -> None:
    """Suggest what to do after an evaluation of these artifacts: the report on one that keeps it,
    or a text through this cache to compare with the exact model's.

    `model`: its name and, if the user gave one, the option for its revision.
    """
    if not artifacts:
        out.suggest("calibrate", *model)
    elif saved:
        out.suggest("report", str(artifacts[0]))
    else:
        prompt = [] if model == ["demo"] else ["--prompt", "TEXT"]
        out.suggest("generate", *model, "--rotations", str(artifacts[0]), "--compare", *prompt)


def _say_evaluation(report: Measured) -> None:
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
    for window in report.windows:
        if len(report.windows) > 1:
            say(f"With {_title(window)}:")
        say(*window.verdict.words)


def _title(window: Window) -> str:
    return f"sink {window.sink}, recent {window.recent}"
