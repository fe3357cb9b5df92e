"""`rotationzoo evaluate`: measure what rotations cost a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rotationzoo.cli import options
from rotationzoo.cli.next_steps import check_is_model, named, retyped, served, suggest_text
from rotationzoo.cli.options import argument, flag, option
from rotationzoo.cli.output import Output, say, table
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.figures import finish
from rotationzoo.words import counted

if TYPE_CHECKING:
    from rotationzoo.artifact.measured import Measured, Window
    from rotationzoo.artifact.scores import Decision


@dataclass(frozen=True)
class Measures(options.Text):
    """Options on what is measured, by the names of `api.evaluate`."""

    data: str | None = option("Data set id, .jsonl, .txt or .parquet (held-out text).")
    tokens: int | None = option("Tokens in all (16384, or as the questions).", min=1)
    length: options.TextLength = None
    tasks: options.Tasks = "all"
    lengths: options.Lengths = None
    questions: str = option("Per task and length; auto: until it is decided.", default="auto")
    minutes: float | None = option("Do what fits into this time.", min=0.1)
    keep: float | None = option("Percent to keep (90); else exit 1.")
    windows: str | None = option("Exact sink/recent tokens: 64/256,128/1024.")
    format: options.Format | None = option("The 2-bit format.")
    bits: options.Budget = None
    rivals: str | None = option("Other engines' caches: fp8,q4_0,exl3-2.")
    pooled: bool | None = option("Also measure one rotation per layer.", "--pooled")
    prefill_chunk: int | None = option("Prefill in chunks of N tokens.", min=1)
    prefill_layout: options.PrefillLayout = None
    rope_scaling: options.RopeScaling = None
    adapter: Path | None = option("Folder of a LoRA adapter, read by peft.")
    batch: int | None = option("Texts per forward pass (1).", min=1)
    anyway: options.Anyway = False


def evaluate_command(
    model: options.ModelName,
    measures: Measures,
    out: Output,
    artifacts: list[Path] | None = argument("Folders of rotations.", None, metavar="ROTATIONS"),
    save: bool = flag("Add evaluation.json to the rotations."),
    details: bool = flag("Also print all tables, with explanations."),
) -> None:
    """Measure what rotations keep of a model in 2 bits, and whether to serve them.

    rotationzoo evaluate demo rotations/demo-oscar

    rotationzoo evaluate Qwen/Qwen3-8B rotations/Qwen3-8B-oscar --for vllm
    """
    artifacts = artifacts or []
    check_is_model(model, "evaluate")
    if save and not artifacts:
        hint = "name a folder of rotations after the model, or print the report with --json"
        raise UsageError("--save adds the report to artifacts, and none is given", hint)
    if measures.keep is not None and not artifacts:
        raise UsageError("--keep decides on rotations, and none are given", "name their folders")
    from rotationzoo.api import evaluation_job
    from rotationzoo.evaluation.evaluate import evaluate

    settings = vars(measures) | {
        "tasks": options.parse_tasks(measures.tasks),
        "lengths": options.parse_lengths(measures.lengths),
        "questions": parse_questions(measures.questions),
        "windows": options.parse_windows(measures.windows) or None,
        "rivals": measures.rivals and measures.rivals.replace(" ", "").split(","),
    }
    job = evaluation_job(model, artifacts, save, **settings)
    with show_progress(out) as progress:
        report = evaluate(job, progress, out.tell)
    show_evaluation(out, report, details)
    decisions, model_words = report.window.verdict.decisions, named(model, measures.revision)
    suggest_next(out, decisions, model_words, artifacts, save, measures.seed or 0, measures.engine)
    if measures.keep is not None:
        check_kept(report)


def check_kept(report: "Measured") -> None:
    """Raise `RotationZooError` unless every decision is to serve."""
    from rotationzoo.artifact.scores import plain_name

    decisions = [each for window in report.windows for each in window.verdict.decisions]
    if failed := [plain_name(each.arm) for each in decisions if each.action != "serve"]:
        raise RotationZooError(
            f"at least {100 * decisions[0].floor:g}% of the answers were to be kept, "
            f"which is not shown of {', '.join(dict.fromkeys(failed))}",
            hint="see the decision above",
        )


def parse_questions(text: str) -> int | Literal["auto"]:
    """Parse a number, or `auto`. Raises `UsageError`."""
    if text != "auto" and not text.removeprefix("-").isdecimal():
        hint = "write it as: --questions 64, or auto"
        raise UsageError(f"--questions {text!r} is not a number", hint)
    return "auto" if text == "auto" else int(text)


def show_evaluation(out: Output, report: "Measured", details: bool = False) -> None:
    """Print the decision on each artifact, with `details` after all tables."""
    out.notes(report.notes)

    def human() -> None:
        if details or not report.window.verdict.decisions:
            _say_details(report)
        for window in report.windows:
            if len(report.windows) > 1:
                say(f"With {_title(window)}:")
            say(*window.verdict.words)

    out.result(report.report(), "\n".join(report.window.arms), human)


def suggest_next(
    out: Output,
    decisions: Sequence["Decision"],
    model: list[str],
    artifacts: list[Path],
    saved: bool,
    seed: int = 0,
    engine: str | None = None,
) -> None:
    """Suggest what the decision on the first of these artifacts calls for. `model`: the words that
    name it. `seed`: of the questions that were asked; new ones need another."""
    from rotationzoo.report.commands import decided_words

    simulated = served(engine)
    if not artifacts:
        out.suggest("calibrate", *model, *simulated)
        return
    decision, more = decisions[0], decisions[0].more_questions
    if decision.action == "ask" and more is not None:
        if decision.more_seconds is not None:
            out.tell(f"{more:,} new questions of each task{finish(decision.more_seconds)}")
        options = {"--minutes": "", "--questions": str(more), "--seed": str(seed + 1)}
        out.suggest(*retyped(options))
    elif words := decided_words(decision, model, str(artifacts[0]), simulated):
        out.suggest(*words)
    elif saved:
        out.suggest("report", str(artifacts[0]))
    else:
        suggest_text(out, artifacts[0], model, *simulated, "--compare")


def _say_details(report: "Measured") -> None:
    from rotationzoo.report import tables

    tokens = f"{counted(report.tokens, 'token')} from position {report.first_position} on"
    text = f"{tokens} in {counted(report.text.rows, 'text')}"
    exact = f"exact perplexity {report.exact.perplexity:.4f}"
    format = f"format {report.format}{tables.describe_prefill(report)}"
    say(f"{report.model}, {text}, {format}; {exact}")
    for number, window in enumerate(report.windows):
        if number:
            say("")
        say(_title(window))
        for each in tables.evaluation_tables(report, window):
            table(each.title, each.columns, each.rows, apart=True)
    say("")
    say(*tables.describe_recall(report))
    say("±: standard error over texts, paired with the exact model")
    say(f"{tables.ABOUT_BITS}; bits here: at {report.text.length:,}")
    say(*tables.describe_arms(report.window.arms.values()))
    say("")


def _title(window: "Window") -> str:
    return f"sink {window.sink}, recent {window.recent}"
