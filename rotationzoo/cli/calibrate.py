"""`rotationzoo calibrate`: compute the rotations of a model, or print a plan of it."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rotationzoo.budget import Budget
from rotationzoo.cli import options
from rotationzoo.cli.next_steps import named, shell_line, show_artifact, suggest_step, typed_words
from rotationzoo.cli.options import argument, option
from rotationzoo.cli.output import Output
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.errors import Interrupted

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.calibration.plan import Job


RECIPES = ("oscar", "oscar-v1", "hadamard", "random", "identity")
"""The names in `recipe.PRESETS`."""


@dataclass(frozen=True)
class Settings(options.Loading):
    """Options on the job, by the names of `api.calibrate`."""

    engine: options.Engine = None
    data: Annotated[
        str | None, option("Data set id, .jsonl, .txt or .parquet file, or bundled.")
    ] = None
    feedback: Annotated[
        bool | None,
        option(
            "Store what a cache needs to choose codes by error feedback.",
            "--feedback/--no-feedback",
        ),
    ] = None
    bits: Annotated[
        float | None, option("Budget: bits an element; layers that lose more get more.")
    ] = None
    key_bits: Annotated[float | None, option("The same for keys alone.")] = None
    value_bits: Annotated[float | None, option("The same for values alone.")] = None
    quick: Annotated[bool, option("Leave out the recipe's budget: 2 bits everywhere.")] = False
    subset: options.Subset = None
    split: options.Split = None
    column: options.Column = None
    images: Annotated[str | None, option("Column of images (vision models).")] = None
    audio: Annotated[str | None, option("Column of audio, as WAV.")] = None
    positions: Annotated[str | None, option("Of these: all, text or media.")] = None
    packing: Annotated[
        str | None,
        option(
            "packed: full rows; mixed: every second row in halves; document: one document per row."
        ),
    ] = None
    tokens: Annotated[int | None, option("Tokens in all (32768).", min=1)] = None
    length: Annotated[int | None, option("Tokens per row (8192).", min=2)] = None
    seed: Annotated[int | None, option("Order of the documents (0).")] = None
    batch: Annotated[
        int | None, option("Rows per forward pass (with a device map all that fit).", min=1)
    ] = None
    rope_scaling: options.RopeScaling = None
    restart: Annotated[bool, option("Drop a checkpoint and replace rotations.")] = False


def calibrate_command(
    model: Annotated[
        str,
        argument("A hub id, a local folder, or demo: a small model that ships with rotationzoo."),
    ],
    settings: Settings,
    out: Output,
    recipe: Annotated[
        str | None, option(f"{', '.join(RECIPES)}, or a YAML file (the engine's).")
    ] = None,
    output: options.OutputFolder = None,
    dry_run: Annotated[bool, option("Say what would be done; read no weights.")] = False,
) -> None:
    """Compute the rotations of a causal language model.

    rotationzoo calibrate demo

    rotationzoo calibrate Qwen/Qwen3-8B --recipe configs/Qwen3-8B.yaml

    rotationzoo calibrate ./my-model --data my-texts.jsonl --tokens 65536
    """
    # Commands import what they need only when they run: `--help` must not wait for torch.
    from rotationzoo.recipe.loading import load

    if recipe is not None:
        load(recipe)  # raises, and so does the next, before torch is imported
    Budget(settings.bits, settings.key_bits, settings.value_bits)
    from rotationzoo.api import calibration_job
    from rotationzoo.cli.calibrate_view import show_plan

    job = calibration_job(model, options.follow_link(output), recipe, **vars(settings))
    engine = settings.engine
    if engine and recipe is None and job.recipe.name != "oscar":  # which nobody need know
        out.note(f"For {engine}: recipe {job.recipe.name}")
    if job.recipe.model not in (None, model):
        out.note(f"Note: this recipe is meant for {job.recipe.model}")
    if dry_run:
        show_plan(out, job)
        return
    # `calibrate` leaves a finished artifact of the same job as it is, and its folder unchanged.
    before = _last_change(job.output)
    artifact = run_job(out, job)
    is_new = _last_change(job.output) != before
    if not is_new:
        out.note("Note: this very job was done already; --restart does it again")
    show_artifact(out, artifact, with_time=is_new)
    suggest_step(out, artifact, named(model, settings.revision), engine)


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
            return calibrate(job, progress, out.note)
    except KeyboardInterrupt:
        if not job.unfinished:
            hint = f"start again with: {shell_line(*typed_words())}"
            raise Interrupted("interrupted before anything was saved", hint) from None
        hint = f"go on with: {shell_line(*typed_words('--restart'))}"  # which would drop it
        raise Interrupted("interrupted; what was done so far is saved", hint) from None
