"""What `evaluate` prints: a table of all arms for each window, and which of them differ."""

from typing import Any

from rotationzoo.artifact.card_results import describe_prefill
from rotationzoo.cache.size import CONTEXT
from rotationzoo.cli.output import Output, say, table


def show_evaluation(out: Output, report: dict[str, Any]) -> None:
    """One table of all arms for each window, and the increase by context length."""
    out.notes(report["notes"])

    def human() -> None:
        text = f"{report['tokens']:,} tokens from position {report['first_position']} on in {report['text']['rows']} texts"
        exact = report["exact"]["perplexity"]
        say(
            f"{report['model']}, {text}, format {report['format']}{describe_prefill(report['prefill_chunk'], report['prefill_layout'])}; exact perplexity {exact:.4f}"
        )
        for window in report["windows"]:
            _arm_table(window)
        say("±: standard error over texts, paired with the exact model")
        say(f"bits: of a cached element at {CONTEXT:,} tokens, windows included")
        for window in report["windows"]:
            if len(report["windows"]) > 1:
                say(f"With {_title(window)}:")
            say(*window["verdict"]["words"])

    out.result(report, "\n".join(report["arms"]), human)


def _arm_table(window: dict[str, Any]) -> None:
    arms = window["arms"]
    rows, by_length = [], []
    for name, arm in arms.items():
        error = arm["standard_error"]
        measured = [
            _with_error(arm["perplexity_increase"], error["perplexity_increase"], "+.2%", ".2%"),
            _with_error(arm["attention_kl"], error["attention_kl"], ".4f", ".4f"),
            _with_error(arm["output_error"], error["output_error"], ".4f", ".4f"),
        ]
        rows.append([name, *measured, f"{arm['bits_per_element']:.2f}"])
        by_length.append(
            [name, *(f"{bucket['perplexity_increase']:+.1%}" for bucket in arm["by_length"])]
        )
    table(_title(window), ["arm", "perplexity", "attention KL", "block error", "bits"], rows)
    starts = [f"from {bucket['from']:,}" for bucket in next(iter(arms.values()))["by_length"]]
    table("by context length", ["arm", *starts], by_length)


def _title(window: dict[str, Any]) -> str:
    return f"sink {window['sink']}, recent {window['recent']}"


def _with_error(value: float | None, error: float | None, form: str, error_form: str) -> str:
    if value is None:
        return "-"
    return f"{value:{form}}" + ("" if error is None else f" ±{error:{error_form}}")
