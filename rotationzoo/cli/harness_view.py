"""What `evaluate --harness` prints: a table of all arms for each task, and its legend."""

from typing import Any

from rotationzoo.cli.output import say, table
from rotationzoo.words import counted

_LONGEST = 200  # characters of an answer; `--json` has all of it


def show_harness(report: dict[str, Any], window: dict[str, Any]) -> None:
    """Print the harness' tasks for one pair of windows; nothing if none were asked."""
    exact = report["exact"].get("harness", {})
    # A group stands for its tasks where it has a metric of its own.
    tasks = [name for name in exact if name in report.get("harness", {}).get("tasks", ())]
    for task in tasks or exact:
        measured = {"exact": exact[task]}
        measured |= {name: arm["harness"][task] for name, arm in window["arms"].items()}
        _show_task(task, measured)
        _show_answers(task, measured)


def explain_harness(report: dict[str, Any]) -> None:
    """Print what the columns of the harness' tables mean."""
    harness = report.get("harness")
    if not harness:
        return
    say(f"Tasks: lm-evaluation-harness {harness['version']}, ±: its standard error")
    say(
        "-lost +gained: questions beside the exact model's; p: McNemar's exact test",
        "tokens, truncated: of generated answers, their mean length, and how many reached the "
        "largest length",
    )


def _show_task(task: str, measured: dict[str, Any]) -> None:
    exact = measured["exact"]
    metrics = [name for name, value in exact.items() if name in exact["standard_error"]]
    generated = "answer_tokens" in exact
    paired = {metric for measures in measured.values() for metric in measures.get("paired", ())}
    columns = ["arm"]
    for metric in metrics:
        columns.append(metric)
        if metric in paired:
            columns.append("-lost +gained")
    if generated:
        columns += ["tokens", "truncated"]
    rows = []
    for name, measures in measured.items():
        row = [name]
        for metric in metrics:
            row.append(_value(measures, metric))
            if metric in paired:
                row.append(_pairing(measures, metric))
        if generated:
            row += [f"{measures['answer_tokens']:.1f}", f"{measures['truncated']:.1%}"]
        rows.append(row)
    questions = f", {counted(exact['questions'], 'question')}" if "questions" in exact else ""
    table(f"{task}{questions}", columns, rows, apart=True)


def _show_answers(task: str, measured: dict[str, Any]) -> None:
    """The answers that were kept, question by question, of the exact model and of each arm."""
    for number, kept in enumerate(measured["exact"].get("answers", ())):
        say("")
        say(f"{task}, question {kept['question']}, right: {_shortened(kept['right'])}")
        for name, measures in measured.items():
            say(f"  {name}: {_shortened(measures['answers'][number]['answer'])}")


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _value(measures: dict[str, Any], metric: str) -> str:
    value, error = measures[metric], measures["standard_error"][metric]
    if value is None:
        return "-"
    return f"{value:.4f}" if error is None else f"{value:.4f} ±{error:.4f}"


def _pairing(measures: dict[str, Any], metric: str) -> str:
    pairing = measures.get("paired", {}).get(metric)
    if pairing is None:
        return ""
    return f"-{pairing['lost']} +{pairing['gained']} (p {pairing['p_value']:.2g})"
