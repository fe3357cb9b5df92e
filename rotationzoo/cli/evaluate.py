"""`rotationzoo evaluate`: measure what rotations cost a model."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from rotationzoo.cli import options
from rotationzoo.cli.command_line import typed_words
from rotationzoo.cli.library_logs import hush_libraries
from rotationzoo.cli.options import argument, option
from rotationzoo.cli.output import Output
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.errors import UsageError


def evaluate_command(
    model: options.ModelName,
    artifacts: Annotated[
        list[Path] | None, argument("Folders of rotations.", metavar="ROTATIONS")
    ] = None,
    engine: options.Engine = None,
    data: Annotated[
        str | None, option("Data set id, .jsonl, .txt or .parquet (held-out text).")
    ] = None,
    subset: options.Subset = None,
    split: options.Split = None,
    column: options.Column = None,
    tokens: Annotated[int | None, option("Tokens in all (16384).", min=1)] = None,
    length: options.TextLength = None,
    seed: Annotated[int | None, option("Order of the documents (0).")] = None,
    tasks: options.Tasks = "all",
    lengths: options.Lengths = None,
    questions: Annotated[str, option("Per task and length; auto: until it is decided.")] = "auto",
    windows: Annotated[
        str | None, option("Sink/recent tokens kept exact, as 64/256,128/1024.")
    ] = None,
    format: Annotated[options.Format | None, option("The 2-bit format")] = None,
    bits: options.Budget = None,
    rivals: Annotated[str | None, option("Other engines' caches, too, as fp8,q4_0,exl3-2.")] = None,
    pooled: Annotated[
        bool | None, option("Also measure one rotation per layer.", "--pooled")
    ] = None,
    layers: Annotated[str | None, option("Only these layers in 2 bits, as 0,4-7.")] = None,
    keys_only: Annotated[bool, option("Leave the values exact.", "--keys-only")] = False,
    values_only: Annotated[bool, option("Leave the keys exact.", "--values-only")] = False,
    prefill_chunk: Annotated[
        int | None, option("Prefill in chunks, which read a quantized history.", min=1)
    ] = None,
    prefill_layout: options.PrefillLayout = None,
    real_cache: Annotated[
        bool, option("Answer through a cache that really stores 2 bits.", "--real-cache")
    ] = False,
    drift: Annotated[int | None, option("Drift over N new tokens.", min=1)] = None,
    queries: Annotated[
        int | None, option("Queries per text for the attention KL (32).", min=0)
    ] = None,
    rope_scaling: options.RopeScaling = None,
    batch: Annotated[int | None, option("Texts per forward pass (1).", min=1)] = None,
    save: Annotated[bool, option("Add evaluation.json to the rotations.", "--save")] = False,
    anyway: options.Anyway = False,
    details: Annotated[
        bool, option("Also print all tables, and how they were measured.", "--details")
    ] = False,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    max_memory: options.MaxMemory = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure what rotations keep of a model whose cache is stored in 2 bits, whether they are
    better than none, and what to do.

    rotationzoo evaluate demo rotations/demo-oscar

    rotationzoo evaluate Qwen/Qwen3-8B rotations/Qwen3-8B-oscar --for vllm
    """
    out = Output(json, quiet)
    if save and not artifacts:
        raise UsageError(
            "--save adds the report to artifacts, and none is given",
            hint="name a folder of rotations after the model, or print the report with --json",
        )
    _check_order(model, artifacts or [])
    from rotationzoo.api import evaluation_job
    from rotationzoo.cli.evaluate_view import show_evaluation, suggest_next
    from rotationzoo.evaluation.job import evaluate
    from rotationzoo.runtime.through_cache import ThroughCache

    hush_libraries()
    job = evaluation_job(
        model,
        artifacts or [],
        save,
        engine=engine,
        data=data,
        subset=subset,
        split=split,
        column=column,
        tokens=tokens,
        length=length,
        seed=seed,
        tasks=options.parse_tasks(tasks),
        lengths=options.parse_lengths(lengths),
        questions=parse_questions(questions),
        windows=options.parse_windows(windows) or None,
        format=format,
        bits=bits,
        rivals=rivals.replace(" ", "").split(",") if rivals else None,
        pooled=pooled,
        layers=parse_layers(layers),
        sides=_quantized_sides(keys_only, values_only),
        prefill_chunk=prefill_chunk,
        prefill_layout=prefill_layout,
        real_cache=real_cache,
        drift=drift,
        queries=queries,
        rope_scaling=rope_scaling,
        batch=batch,
        anyway=anyway,
        revision=revision,
        device=device,
        dtype=dtype,
        device_map=device_map,
        max_memory=max_memory,
    )
    with show_progress(out) as progress:
        report = evaluate(job, progress, ThroughCache, out.tell)
    show_evaluation(out, report, details)
    words = [model, "--revision", revision] if revision else [model]
    decisions, given = report.window.verdict.decisions, artifacts or []
    suggest_next(out, decisions, words, given, save, seed or 0, engine)


def _check_order(model: str, artifacts: list[Path]) -> None:
    """Raise `UsageError` if an artifact stands in the model's place."""
    if (Path(model) / "manifest.json").is_file():
        named = list(map(str, artifacts))
        rest = typed_words("evaluate", model, *named)
        words = ["rotationzoo", "evaluate", *(named or ["MODEL"]), model, *rest]
        raise UsageError(
            f"{model} has rotations, and the model comes before them",
            hint=f"give them as: {shlex.join(words)}",
        )


def _quantized_sides(keys_only: bool, values_only: bool) -> tuple[str, ...]:
    if keys_only and values_only:
        raise UsageError(
            "--keys-only and --values-only leave nothing to store in 2 bits",
            hint="give one of them",
        )
    if keys_only:
        return ("key",)
    if values_only:
        return ("value",)
    return ("key", "value")


def parse_questions(text: str) -> int | Literal["auto"]:
    """Parse a number, or `auto`. Raises `UsageError`."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(
            f"--questions {text!r} is no number", hint="write it as: --questions 64, or auto"
        ) from error


def parse_layers(text: str | None) -> set[int] | None:
    """Parse `0,4-7` to `{0, 4, 5, 6, 7}`. Raises `UsageError`."""
    if text is None:
        return None
    layers: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if not numbers:
                raise ValueError(part)
            layers.update(numbers)
    except ValueError as error:
        raise UsageError(
            f"--layers has no layer in {part!r}", hint="write it as: --layers 0,4-7"
        ) from error
    return layers
