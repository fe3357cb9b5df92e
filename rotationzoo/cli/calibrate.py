"""`rotationzoo calibrate`: compute the rotations of a model, or print what that takes."""

import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rotationzoo.cli import next_steps
from rotationzoo.cli.next_steps import named, served, shell_line, typed_words
from rotationzoo.cli.output import Output, say
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.codec.engine_needs import ENGINES
from rotationzoo.codec.formats import BUDGETED, FORMATS, SEGMENTS
from rotationzoo.errors import Interrupted, ModelUnavailable, RotationZooError, UsageError
from rotationzoo.geometry import Geometry, cached_layers, cached_rows, geometry_json
from rotationzoo.settings import RECIPES, CalibrationSettings, EvaluationSettings, Lengths
from rotationzoo.settings_base import flag, option
from rotationzoo.sides import HEADS
from rotationzoo.storage.folders import follow_link
from rotationzoo.words import counted, finish, size_words

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.calibration.plan import Job, Plan


def calibrate_command(
    settings: CalibrationSettings,
    out: Output,
    keep: float | None = option("Find the fewest bits that keep N percent of the answers."),
    lengths: Lengths = None,
    dry_run: bool = flag("Show what would be done, without reading weights."),
) -> None:
    """Compute the rotations of a causal language model.

    rotationzoo calibrate demo

    rotationzoo calibrate Qwen/Qwen3-8B --recipe configs/Qwen3-8B.yaml

    rotationzoo calibrate ./my-model --data my-texts.jsonl --tokens 65536
    """
    if lengths and keep is None:
        raise UsageError("--lengths is only for the questions of --keep", "add: --keep 90")
    # Commands import what they need only when they run: `--help` must not wait for torch.
    from rotationzoo.recipe.loading import load

    if isinstance(settings.recipe, str):
        load(settings.recipe)  # raises, and so does the next, before torch is imported
    _ = settings.budget
    from rotationzoo.api import calibration_job
    from rotationzoo.evaluation.prepare import check_keep

    job = calibration_job(replace(settings, output=follow_link(settings.output)))
    model, engine = str(settings.model), settings.engine
    if engine and settings.recipe is None and job.recipe.name != RECIPES[0]:
        out.note(f"For {engine}: recipe {job.recipe.name}")
    if job.recipe.model not in (None, model):
        out.note(f"Note: this recipe is meant for {job.recipe.model}")
    if keep is not None:
        check_keep(keep)
    if dry_run:
        show_plan(out, job)
        return
    # A finished artifact of the same job is left as it is, and its folder unchanged.
    before = job.output.stat().st_ctime_ns if job.output.exists() else None
    artifact = run_job(out, job)
    if keep is not None:
        _find_bits(out, artifact, settings, keep, lengths)
        return
    is_new = job.output.stat().st_ctime_ns != before
    if not is_new:
        out.note("Note: this job is already done; --restart runs it again")
    next_steps.show_artifact(out, artifact, with_time=is_new)
    next_steps.suggest_step(out, artifact, named(model, settings.revision), engine)


def _find_bits(
    out: Output,
    artifact: "Artifact",
    settings: CalibrationSettings,
    keep: float,
    lengths: int | Sequence[int] | None,
) -> None:
    """Find the fewest bits (or check the user's) that keep this percentage of the answers, and show
    the command that serves them. Raises `RotationZooError` if none are shown to."""
    from rotationzoo.api import evaluation_job
    from rotationzoo.artifact.scores import plain_name
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.evaluation.evaluate import evaluate
    from rotationzoo.report.card import usual_engine

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
        **settings.run_options,
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
        command = ENGINES[engine].command
        serve, write = [*words, "--rotations", folder], [folder, "--for", engine]
        out.suggest(*([command, *serve] if command else ["export", *write]))
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


def run_job(out: Output, job: "Job") -> "Artifact":
    """Run the job. Raises `Interrupted`, which says how to continue."""
    from rotationzoo.calibration.calibrate import calibrate

    # Schedulers end jobs with SIGTERM. Like Ctrl-C, it should say how to resume.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with show_progress(out) as progress:
            return calibrate(job, progress, out.tell)
    except KeyboardInterrupt:
        if not job.unfinished:
            hint = f"start again with: {shell_line(*typed_words())}"
            raise Interrupted("interrupted before anything was saved", hint) from None
        hint = f"resume with: {shell_line(*typed_words('--restart'))}"  # which would drop it
        raise Interrupted("interrupted; what was done so far is saved", hint) from None


def show_plan(out: Output, job: "Job") -> None:
    """Print the plan of a job. Raises `RotationZooError` for unusable text."""
    from rotationzoo.calibration.calibrate import read_text
    from rotationzoo.calibration.plan import plan

    planned = plan(job)
    if planned.refusal is None:
        try:
            text = read_text(planned)
            further = [text.note] if text and text.note else []
        except ModelUnavailable as error:  # for its tokenizer, or the processor of its media
            further = [f"it cannot be calibrated yet: {error}"]
        planned = replace(planned, notes=(*planned.notes, *further))
    data = _plan_json(planned)
    out.notes(planned.notes)
    out.result(data, str(planned.job.output), lambda: _say_plan(planned, data))
    if planned.refusal is None:
        fits = planned.peak_memory_bytes <= planned.memory_bytes or job.device_map is not None
        # With a device map, weights that do not fit stay on disk.
        out.suggest(*typed_words("--dry-run"), *([] if fits else ["--device-map", "auto"]))


def _plan_json(planned: "Plan") -> dict[str, Any]:
    from rotationzoo.codec.size import BudgetSizes, bits_per_element, codec_bits
    from rotationzoo.codec.windows import CacheLayout

    recipe, cached = planned.job.recipe, cached_layers(planned.geometry or [])
    bits: dict[str, float | None] = dict.fromkeys(FORMATS)
    if cached:
        layouts = {name: CacheLayout.of_recipe(recipe, each) for name, each in FORMATS.items()}
        bits |= {name: bits_per_element(cached, layout) for name, layout in layouts.items()}
        if recipe.budget:
            exact = CacheLayout.of_recipe(recipe, SEGMENTS)
            bits = {BUDGETED: codec_bits(cached, BudgetSizes(recipe.budget), exact), **bits}
    return {
        "model": planned.source.name,
        "revision": planned.source.revision,
        "recipe": recipe.name,
        "layers": len(cached),
        "kv_heads": _common(cached, "kv_heads"),
        "head_dim": _common(cached, "key_dim"),
        "value_head_dim": _common(cached, "value_dim"),
        "tokens": recipe.data.tokens if recipe.needs_statistics else 0,
        "length": recipe.data.length,
        "batch": planned.job.batch,
        "weights_bytes": planned.weights_bytes,
        "peak_memory_bytes": planned.peak_memory_bytes,
        "memory_bytes": planned.memory_bytes,
        "artifact_bytes": planned.artifact_bytes,
        "bits_per_element": bits,
        "refusal": planned.refusal and str(planned.refusal),
        "notes": list(planned.notes),
        "output": str(planned.job.output),
        "geometry": geometry_json(planned.geometry or []),
    }


def _common(layers: Geometry, field: str) -> int | list[int]:
    """The field of all layers, as one value if they share it."""
    values: list[int] = [getattr(layer, field) for layer in layers]
    return values[0] if len(set(values)) == 1 else values


def _say_plan(planned: "Plan", data: dict[str, Any]) -> None:
    from rotationzoo.codec.size import CONTEXT

    name, job = planned.source.name, planned.job
    if planned.refusal:
        say(f"{name} cannot be calibrated: {planned.refusal}")
        return
    if planned.geometry is None:
        say(f"{name}: its cache is unknown until its weights are read")
    else:
        heads = f"KV heads {data['kv_heads']}, head dimension {data['head_dim']}"
        if (cached := cached_rows(planned.geometry)) is not HEADS:
            heads = f"{cached.words} of {data['head_dim']} elements"
        say(f"{name}: {counted(data['layers'], 'layer')} with a cache, {heads}")
    weights, artifact = size_words(planned.weights_bytes), size_words(planned.artifact_bytes)
    say(f"Weights {weights}, artifact {artifact}, {counted(data['tokens'], 'token')}")
    peak, present = size_words(planned.peak_memory_bytes), size_words(planned.memory_bytes)
    shortage = ", which is not enough" if planned.peak_memory_bytes > planned.memory_bytes else ""
    say(f"Memory: about {peak} of the {present} here{shortage}")
    if data["layers"]:
        bits = [f"{value:.2f} ({format})" for format, value in data["bits_per_element"].items()]
        say(f"Bits per cached element at {CONTEXT:,} tokens, windows included: {', '.join(bits)}")
    say(f"Would write: {job.output}")
