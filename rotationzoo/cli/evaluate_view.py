"""What `evaluate` prints: a table of all arms for each window, and which arms clearly differ."""

from pathlib import Path
from typing import Any

from rotationzoo.artifact.card_results import (
    ABOUT_FEEDBACK,
    ABOUT_KIVI,
    ABOUT_POOLED,
    describe_prefill,
)
from rotationzoo.cli.answers_view import explain_answers, show_answers
from rotationzoo.cli.harness_view import explain_harness, show_harness
from rotationzoo.cli.output import Output, say, table
from rotationzoo.simulation.size import CONTEXT
from rotationzoo.words import counted


def show_evaluation(out: Output, report: dict[str, Any]) -> None:
    """Print the arms for each window: what they answer, and their perplexity increase by context
    length."""
    out.notes(report["notes"])
    out.result(report, "\n".join(report["arms"]), lambda: _say_evaluation(report))


def suggest_next(out: Output, model: list[str], artifacts: list[Path], saved: bool) -> None:
    """Suggest what to do after an evaluation of these artifacts: the report on one that keeps it,
    or a text through this cache beside the exact model's.

    `model`: its name and, if the user gave one, the option for its revision.
    """
    if not artifacts:
        out.suggest("calibrate", *model)
    elif saved:
        out.suggest("report", str(artifacts[0]))
    else:
        prompt = [] if model == ["demo"] else ["--prompt", "TEXT"]
        out.suggest("generate", *model, "--rotations", str(artifacts[0]), "--compare", *prompt)


def _say_evaluation(report: dict[str, Any]) -> None:
    windows = report["windows"]
    tokens = f"{counted(report['tokens'], 'token')} from position {report['first_position']} on"
    text = f"{tokens} in {counted(report['text']['rows'], 'text')}"
    prefill = describe_prefill(report["prefill_chunk"], report["prefill_layout"])
    exact = f"exact perplexity {report['exact']['perplexity']:.4f}"
    say(f"{report['model']}, {text}, format {report['format']}{prefill}; {exact}")
    for number, window in enumerate(windows):
        if number:
            say("")
        say(_title(window))
        show_answers(report, window)
        _show_arms(window)
        show_harness(report, window)
    say("")
    explain_answers(report)
    explain_harness(report)
    say("±: standard error over texts, paired with the exact model")
    say(
        f"bits: of a cached element at {CONTEXT:,} tokens, exact tokens included; "
        f"bits here: at {report['text']['length']:,}"
    )
    say(ABOUT_KIVI)
    if windows[0]["verdict"]["feedback"]:
        say(ABOUT_FEEDBACK)
    if any(name.endswith("+pooled") for name in windows[0]["arms"]):
        say(ABOUT_POOLED)
    say("")
    for window in windows:
        if len(windows) > 1:
            say(f"With {_title(window)}:")
        say(*window["verdict"]["words"])


def _show_arms(window: dict[str, Any]) -> None:
    arms = window["arms"]
    rows, by_length = [], []
    for name, arm in arms.items():
        error = arm["standard_error"]
        perplexity, perplexity_error = arm["perplexity_increase"], error["perplexity_increase"]
        rows.append(
            [
                name,
                _with_error(perplexity, perplexity_error, "+.2%", ".2%"),
                _with_error(arm["attention_kl"], error["attention_kl"], ".4f", ".4f"),
                _with_error(arm["output_error"], error["output_error"], ".4f", ".4f"),
                f"{arm['bits_per_element']:.2f}",
                f"{arm['bits_at_length']:.2f}",
            ]
        )
        increases = [f"{bucket['perplexity_increase']:+.1%}" for bucket in arm["by_length"]]
        by_length.append([name, *increases])
    columns = ["arm", "perplexity", "attention KL", "block error", "bits", "bits here"]
    table("cost", columns, rows, apart=True)
    some_arm = next(iter(arms.values()))  # the lengths are the same for all
    starts = [f"from {bucket['from']:,}" for bucket in some_arm["by_length"]]
    table("by context length", ["arm", *starts], by_length, apart=True)


def _title(window: dict[str, Any]) -> str:
    return f"sink {window['sink']}, recent {window['recent']}"


def _with_error(
    value: float | None, error: float | None, value_format: str, error_format: str
) -> str:
    if value is None:
        return "-"
    if error is None:  # a single text has no standard error
        return f"{value:{value_format}}"
    return f"{value:{value_format}} ±{error:{error_format}}"
