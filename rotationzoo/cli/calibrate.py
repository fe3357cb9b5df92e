"""`rotationzoo calibrate`: compute the rotations of a model, or print a plan of it."""

import shlex
import signal
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotationzoo.budget import Budget
from rotationzoo.cli import next_steps, options
from rotationzoo.cli.next_steps import named, served, shell_line, typed_words
from rotationzoo.cli.options import Loading, flag, option
from rotationzoo.cli.output import Output
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.codec.engine_needs import ENGINES
from rotationzoo.errors import Interrupted, RotationZooError, UsageError
from rotationzoo.figures import finish

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.calibration.plan import Job


RECIPES = ("oscar", "oscar-v1", "hadamard", "random", "identity")
"""The names in `recipe.PRESETS`, the default first."""


_SLOWER = 4  # times as long as the exact model alone take this and a simulated cache, on a CPU


@dataclass(frozen=True)
class Settings(options.Text):
    """Options on the job, by the names of `api.calibrate`."""

    feedback: bool | None = option("Store what error feedback needs.", "--feedback/--no-feedback")
    bits: float | None = option("Budget: bits an element; layers that lose more get more.")
    key_bits: float | None = option("The same for keys alone.")
    value_bits: float | None = option("The same for values alone.")
    quick: bool = flag("No budget: 2-bit codes, with scales 2.25 to 3 bits an element.")
    images: str | None = option("Column of images (vision models).")
    audio: str | None = option("Column of audio, as WAV.")
    batch: int | None = option("Rows per forward pass (with a device map all that fit).", min=1)
    rope_scaling: options.RopeScaling = None
    restart: bool = flag("Drop a checkpoint and replace rotations.")


def calibrate_command(
    model: options.ModelName,
    settings: Settings,
    out: Output,
    recipe: str | None = option(f"{', '.join(RECIPES)}, or a YAML file (the engine's)."),
    output: options.OutputFolder = None,
    keep: float | None = option("Find the fewest bits that keep N percent of answers."),
    lengths: options.Lengths = None,
    dry_run: bool = flag("Say what would be done; read no weights."),
) -> None:
    """Compute the rotations of a causal language model.

    rotationzoo calibrate demo

    rotationzoo calibrate Qwen/Qwen3-8B --recipe configs/Qwen3-8B.yaml

    rotationzoo calibrate ./my-model --data my-texts.jsonl --tokens 65536
    """
    asked = options.parse_lengths(lengths)
    if asked and keep is None:
        raise UsageError("--lengths are of the questions for --keep", "add: --keep 90")
    # Commands import what they need only when they run: `--help` must not wait for torch.
    from rotationzoo.recipe.loading import load

    if recipe is not None:
        load(recipe)  # raises, and so does the next, before torch is imported
    Budget(settings.bits, settings.key_bits, settings.value_bits)
    from rotationzoo.api import QUESTION_LENGTH, calibration_job
    from rotationzoo.cli.calibrate_view import show_plan
    from rotationzoo.evaluation.prepare import check_keep
    from rotationzoo.evaluation.rungs import RUNGS
    from rotationzoo.evaluation.tasks.prompts import TaskSettings

    job = calibration_job(model, options.follow_link(output), recipe, **vars(settings))
    engine = settings.engine
    if engine and recipe is None and job.recipe.name != RECIPES[0]:  # which needs no words
        out.note(f"For {engine}: recipe {job.recipe.name}")
    if job.recipe.model not in (None, model):
        out.note(f"Note: this recipe is meant for {job.recipe.model}")
    question_tokens = 0
    if keep is not None:
        check_keep(keep)
        tasks, caches = TaskSettings(lengths=tuple(asked or ())), 1 + len(RUNGS)
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
        _find_bits(out, model, artifact, settings, {"keep": keep, "lengths": asked})
        return
    is_new = _last_change(job.output) != before
    if not is_new:
        out.note("Note: this very job was done already; --restart does it again")
    next_steps.show_artifact(out, artifact, with_time=is_new)
    next_steps.suggest_step(out, artifact, named(model, settings.revision), engine)


def _find_bits(
    out: Output, model: str, artifact: "Artifact", settings: Settings, asked: dict[str, Any]
) -> None:
    """Ask for the fewest bits that keep what is `asked`, unless the user chose the bits, and show
    them with the command that serves them. Raises `RotationZooError` where none are shown to."""
    from rotationzoo.api import evaluation_job
    from rotationzoo.artifact.scores import plain_name
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.evaluation.evaluate import evaluate
    from rotationzoo.report.commands import usual_engine

    names = ["rope_scaling", *(each.name for each in fields(Loading))]
    how = asked | {name: getattr(settings, name) for name in names}
    is_open = settings.bits is None and settings.key_bits is None
    job = evaluation_job(model, artifact, True, fewest_bits=is_open, baselines=(), **how)
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
    keep = asked["keep"]
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
