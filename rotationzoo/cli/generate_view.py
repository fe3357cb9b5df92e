"""What `generate` prints beside the text: the exact model's text, speed and bytes, or one JSON
object."""

import json
from typing import Any

from rotationzoo.cli.output import Mode, Output, say, write_text
from rotationzoo.words import counted

_SHOWN = 24  # characters of each text after the place where two part


def show_generation(out: Output, report: dict[str, Any]) -> None:
    """Print the report of a text that is on stdout already, unless a program reads the output."""
    if out.mode is Mode.QUIET:
        return
    out.result(report, "", lambda: _say_generation(out, report))


def _say_generation(out: Output, report: dict[str, Any]) -> None:
    if "answer" in report:
        say(f"The statement in the prompt says: {report['answer'].strip()}")
    if "exact_text" in report:
        _say_exact(report)
    out.note(_summary(report))


def _say_exact(report: dict[str, Any]) -> None:
    parted = report["parted_at"]
    if parted is None:
        say(f"The exact model writes the same {counted(report['exact_tokens'], 'token')}.")
        return
    text, exact = report["text"], report["exact_text"]
    say("", "The exact model writes:")
    write_text(report.get("question", "") + exact.removesuffix("\n") + "\n")
    start = parted["character"]
    same = f"{counted(start, 'character')} ({counted(parted['token'], 'token')})"
    say("", f"The two part after {same}: here {_quote(text, start)}, exact {_quote(exact, start)}.")


def _quote(text: str, start: int) -> str:
    """The text from a place on, or its end in words."""
    if start == len(text):
        return "the text ends"
    return json.dumps(text[start : start + _SHOWN], ensure_ascii=False)


def _summary(report: dict[str, Any]) -> str:
    """Speed and bytes in one line."""
    words = counted(report["tokens"], "token")
    if report["tokens_per_second"] is not None:
        words += f" at {report['tokens_per_second']:,.1f} a second"
    words += f"; prompt of {report['prompt_tokens']:,}"
    if report["prompt_tokens_per_second"] is not None:
        words += f" at {report['prompt_tokens_per_second']:,.0f} a second"
    held, exact = report["cache_bytes"], report["bf16_cache_bytes"]
    words += f"; cache {_size(held)}, and {_size(exact)} in bf16"
    if held and exact > held:
        words += f" ({exact / held:.1f} times smaller)"
    # The cache has read all tokens but the last one.
    if report["prompt_tokens"] + report["tokens"] - 1 <= report["sink"] + report["recent"]:
        words += "; so short a context stays exact"
    if report["rotations"] is None:
        words += "; no rotation"
    return words


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def suggest_next(out: Output, report: dict[str, Any], model: str, rotations: str | None) -> None:
    """Suggest a text of the user's own, a rotation, or what the rotations cost the model.

    `model`, `rotations`: as the user named them; None for rotations that were not named.
    """
    if "answer" in report:
        named = [] if rotations is None else ["--rotations", rotations]
        out.suggest("generate", model, *named, "--prompt", "def ", "--compare")
    elif report["rotations"] is None:
        out.suggest("calibrate", model)
    else:
        out.suggest("evaluate", model, report["rotations"])
