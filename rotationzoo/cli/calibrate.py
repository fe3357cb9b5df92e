"""`rotationzoo calibrate`: compute the rotations of a model, or print a plan of it."""

import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rotationzoo.cli import next_steps
from rotationzoo.cli.next_steps import named, served, shell_line, typed_words
from rotationzoo.cli.options import follow_link
from rotationzoo.cli.output import Output
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.codec.engine_needs import ENGINES
from rotationzoo.errors import Interrupted, RotationZooError, UsageError
from rotationzoo.figures import finish
from rotationzoo.options import as_tuple, flag, option
from rotationzoo.settings import (
    RECIPES,
    CalibrationSettings,
    EvaluationSettings,
    Lengths,
    RunSettings,
)

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.calibration.plan import Job

_SLOWER = 4  # times as long as the exact model alone take this and a simulated cache, on a CPU


def calibrate_command(
    settings: CalibrationSettings,
    out: Output,
    keep: float | None = option("Find the fewest bits that keep N percent of answers."),
    lengths: Lengths = None,
    dry_run: bool = flag("Say what would be done; read no weights."),
) -> None:
    """Compute the rotations of a causal language model.

    rotationzoo calibrate demo

    rotationzoo calibrate Qwen/Qwen3-8B --recipe configs/Qwen3-8B.yaml

    rotationzoo calibrate ./my-model --data my-texts.jsonl --tokens 65536
    """
    if lengths and keep is None:
        raise UsageError("--lengths are of the questions for --keep", "add: --keep 90")
    # Commands import what they need only when they run: `--help` must not wait for torch.
    from rotationzoo.recipe.loading import load

    if isinstance(settings.recipe, str):
        load(settings.recipe)  # raises, and so does the next, before torch is imported
    _ = settings.budget
    from rotationzoo.api import QUESTION_LENGTH, calibration_job
    from rotationzoo.cli.calibrate_view import show_plan
    from rotationzoo.evaluation.prepare import check_keep
    from rotationzoo.evaluation.rungs import RUNGS
    from rotationzoo.evaluation.tasks.prompts import TaskSettings

    job = calibration_job(replace(settings, output=follow_link(settings.output)))
    model, engine = str(settings.model), settings.engine
    if engine and settings.recipe is None and job.recipe.name != RECIPES[0]:  # which needs no words
        out.note(f"For {engine}: recipe {job.recipe.name}")
    if job.recipe.model not in (None, model):
        out.note(f"Note: this recipe is meant for {job.recipe.model}")
    question_tokens = 0
    if keep is not None:
        check_keep(keep)
        tasks, caches = TaskSettings(lengths=as_tuple(lengths)), 1 + len(RUNGS)
        tokens = tasks.most_tokens(QUESTION_LENGTH)
        question_tokens, least = caches * tokens, tokens * tasks.looks[0] / tasks.looks[-1]
        job = replace(job, asked_tokens=(_SLOWER * least, _SLOWER * question_tokens))
    if dry_run:
        show_plan(out, job, question_tokens)
        return
    # `calibrate` leaves a finished artifact of the same job as it is, and its folder unchanged.
    before = _last_change(job.output)
    artifact = run_job(out, job)
    if keep is not None:
        _find_bits(out, artifact, settings, keep, lengths)
        return
    is_new = _last_change(job.output) != before
    if not is_new:
        out.note("Note: this very job was done already; --restart does it again")
    next_steps.show_artifact(out, artifact, with_time=is_new)
    next_steps.suggest_step(out, artifact, named(model, settings.revision), engine)


def _find_bits(
    out: Output,
    artifact: "Artifact",
    settings: CalibrationSettings,
    keep: float,
    lengths: int | Sequence[int] | None,
) -> None:
    """Ask for the fewest bits that keep so many percent of the answers, unless the user chose the
    bits, and show them with the command that serves them. Raises `RotationZooError` where none are
    shown to."""
    from rotationzoo.api import evaluation_job
    from rotationzoo.artifact.scores import plain_name
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.evaluation.evaluate import evaluate
    from rotationzoo.report.commands import usual_engine

    model = str(settings.model)
    asked = EvaluationSettings(
        model,
        artifact,
        save=True,
        keep=keep,
        lengths=lengths,
        fewest_bits=not settings.budget,
        baselines=(),
        engine=settings.engine,
        rope_scaling=settings.rope_scaling,
        **settings.part(RunSettings),
    )
    job = evaluation_job(asked)
    with show_progress(out) as progress:
        report = evaluate(job, progress, out.tell)
    out.notes(report.notes)
    decision, words = report.window.verdict.decisions[0], named(model, settings.revision)
    if job.rungs and decision.action == "serve":
        artifact = Artifact.open(artifact.folder.with_name(plain_name(decision.arm)))
    next_steps.show_artifact(out, artifact, False, decision)
    folder, engine = str(artifact.folder), settings.engine or usual_engine(artifact.manifest)
    if decision.action == "serve":
        use = ["export", folder, "--for", engine]
        if command := ENGINES[engine].command:
            use = [command, *words, "--rotations", folder]
        out.suggest(*use)
        return
    hint = f"serve it with fp8: {shlex.join(['vllm', 'serve', model])} --kv-cache-dtype fp8"
    if decision.action == "nothing":
        hint = "ask what it can do: other --lengths, or evaluate with other --tasks"
    elif decision.action == "ask":
        further = ["evaluate", *words, folder, *served(settings.engine), "--keep", f"{keep:g}"]
        more = ["--questions", str(decision.more_questions), "--seed", "1"]
        most = ["--bits", f"{job.rungs[-1].bits:g}"] if job.rungs else []
        seconds = finish(decision.more_seconds or 0).partition(",")[0]
        hint = f"ask more questions, which{seconds}: {shell_line(*further, *most, *more)}"
    raise RotationZooError(f"nothing shows that {keep:g}% of the answers are kept", hint=hint)


def _last_change(folder: Path) -> int | None:
    return folder.stat().st_ctime_ns if folder.exists() else None


def run_job(out: Output, job: "Job") -> "Artifact":
    """Run the job. Raises `Interrupted`, which says how to continue."""
    from rotationzoo.calibration.calibrate import calibrate

    # Schedulers end jobs with SIGTERM. Treat it like Ctrl-C, so that work is saved and the error
    # says how to continue.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with show_progress(out) as progress:
            return calibrate(job, progress, out.tell)
    except KeyboardInterrupt:
        if not job.unfinished:
            hint = f"start again with: {shell_line(*typed_words())}"
            raise Interrupted("interrupted before anything was saved", hint) from None
        hint = f"go on with: {shell_line(*typed_words('--restart'))}"  # which would drop it
        raise Interrupted("interrupted; what was done so far is saved", hint) from None
