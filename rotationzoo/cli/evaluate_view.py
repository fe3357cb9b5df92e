"""The output of `evaluate`: the tables of each pair of windows, and which arms clearly differ."""

from pathlib import Path

from rotationzoo.artifact.measured import Measured, Window
from rotationzoo.cli.output import Output, say, show_table
from rotationzoo.report.conditions import (
    ABOUT_BITS,
    describe_arms,
    describe_harness,
    describe_prefill,
    describe_recall,
)
from rotationzoo.report.tables import EXACT, evaluation_tables, harness_table
from rotationzoo.words import counted

_LONGEST = 200  # characters of an answer; `--json` has all of it


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
        _show_harness(report, window)
    say("")
    say(*describe_recall(report), *describe_harness(report))
    say("±: standard error over texts, paired with the exact model")
    say(f"{ABOUT_BITS}; bits here: at {report.text.length:,}")
    say(*describe_arms(report.window.arms.values()))
    say("")
    for window in report.windows:
        if len(report.windows) > 1:
            say(f"With {_title(window)}:")
        say(*window.verdict.words)


def _show_harness(report: Measured, window: Window) -> None:
    """The harness' tasks for one pair of windows; nothing if none were asked."""
    exact = report.exact.harness
    if report.harness is None or exact is None:
        return
    # A group stands for its tasks where it has a metric of its own.
    tasks = [name for name in exact if name in report.harness.tasks]
    for task in tasks or exact:
        scores = {EXACT: exact[task]}
        scores |= {name: arm.harness[task] for name, arm in window.arms.items() if arm.harness}
        show_table(harness_table(task, scores), apart=True)
        for number, kept in enumerate(exact[task].answers):
            say("")
            say(f"{task}, question {kept.question}, right: {_shortened(kept.right)}")
            for name, score in scores.items():
                say(f"  {name}: {_shortened(score.answers[number].answer)}")


def _title(window: Window) -> str:
    return f"sink {window.sink}, recent {window.recent}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
