"""Runs one whole calibration, from a model's name to an artifact on disk.

A job can be stopped and resumed. The output folder is checked first: whether it is writable,
replaceable, or already finished.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.manifest import hash_config
from rotationzoo.artifact.store import MANIFEST, Artifact
from rotationzoo.calibration.checkpoint import Checkpoint, Identity, differences
from rotationzoo.calibration.collect import collect, read_row
from rotationzoo.calibration.memory import device_name, peak_memory
from rotationzoo.calibration.plan import Job, Plan, plan
from rotationzoo.calibration.recipe_checks import check_recipe, settle_centering
from rotationzoo.calibration.sensitivity import check_cache, measure_sensitivities, write_texts
from rotationzoo.calibration.soundness import FETCH_AGAIN, write_sound_artifact
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.errors import RotationZooError, Unsound, UnsupportedModel
from rotationzoo.geometry import Geometry, geometry_json, shifted_layers
from rotationzoo.linalg.moments import Statistics, average
from rotationzoo.model import loading, prediction
from rotationzoo.model.capture import check_transparent
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.own_name import remember_model
from rotationzoo.model.placement import place_weights
from rotationzoo.model.source import Source, fetch, fetch_weights, weights_fingerprint
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import without_budget
from rotationzoo.rotations import Rotations
from rotationzoo.storage import folders
from rotationzoo.storage.files import disk_errors
from rotationzoo.storage.folders import locked, recover
from rotationzoo.text.media import read_media_corpus
from rotationzoo.text.rows import Corpus, read_corpus
from rotationzoo.words import differing, duration, finish
from rotationzoo.writer import check_replaceable, library_versions

Note = Callable[[str], None] | None
_PACED_TOKENS = 128  # of the first row, whose pass shows how long all take
_SHORT = 30  # seconds, which need no estimate
_CHECKED_TOKENS = 32  # of the first row; their logits are compared with and without capture
_DATA_KEYS = ("source", "subset", "split", "column", "packing", "length", "seed")


def check_output(job: Job) -> None:
    """Raise `RotationZooError` unless the output can be written and what is there may be
    replaced: the artifact of another recipe only if the user asks for that with `--restart`, or
    did so for the unfinished run that is being resumed."""
    with disk_errors(job.output):
        recover(job.output)
        check_replaceable(job.output)
        if (job.output / MANIFEST).is_file():
            artifact = Artifact.open(job.output)
            if not (job.restart or job.unfinished or _asked_recipe(artifact) == job.recipe.hash):
                raise _other_recipe(job, artifact)
    folders.check_writable(job.output)


def finished_artifact(job: Job, identity: Identity) -> Artifact | None:
    """The finished artifact of this same job, or None if it is missing, damaged or about to be
    replaced. Raises `RotationZooError` if the folder holds the artifact of another job."""
    if job.restart or job.unfinished or not (job.output / MANIFEST).is_file():
        return None
    artifact = Artifact.open(job.output)
    saved = {**artifact.manifest.identity, "recipe": _asked_recipe(artifact)}
    if changed := differences(saved, identity):
        problem = f"{job.output} holds the work of another job: {differing(changed)}"
        hint = "choose another place with --output, or replace it with --restart"
        raise RotationZooError(problem, hint)
    return None if artifact.damaged_files() else artifact


def _other_recipe(job: Job, artifact: Artifact) -> RotationZooError:
    """The error for the artifact of another recipe, with settings of the text that differ."""
    existing = f"{artifact.recipe.name} for {artifact.manifest.model.id}"
    saved, asked = artifact.manifest.recipe["data"], job.recipe.published()["data"]
    changed = [key for key in {**saved, **asked} if saved.get(key) != asked.get(key)]
    if artifact.recipe.name == job.recipe.name and changed:
        existing += f", with other {', '.join(changed)}"
    return RotationZooError(
        f"{job.output} holds the work of another recipe ({existing})",
        hint="choose another place with --output, or replace it with --restart",
    )


def _asked_recipe(artifact: Artifact) -> str:
    """The hash of the recipe that the user asked for. Another was followed if only the weights
    showed that keys cannot be centered."""
    manifest = artifact.manifest
    return str(manifest.identity.get("recipe", manifest.recipe_sha256))


def calibrate(job: Job, progress: Progress = silent, note: Note = None) -> Artifact:
    """Run a job, resuming from a checkpoint of the same job if there is one, and return its
    artifact, unchanged if it is there already.

    `note` is told at the start what differs from what was asked for. Raises `RotationZooError` for
    everything that a user can put right, before the passes through the model where it can be known.
    """
    with ExitStack() as locks:
        try:
            return _calibrate(job, progress, note, locks)
        except Unsound:
            # Resuming from the same sums would only be refused again.
            Checkpoint(job.checkpoint, {}).remove()
            raise


def _calibrate(job: Job, progress: Progress, note: Note, locks: ExitStack) -> Artifact:
    """Run the job under a lock, which `locks` holds until the end, so that no other calibration
    touches the checkpoint or the artifact's folder."""
    started, versions = time.monotonic(), library_versions()
    progress("looking at the model", 0, 0)
    planned = plan(job)
    if planned.refusal is not None:
        raise planned.refusal
    job, source = planned.job, planned.source
    if note:
        for each in planned.notes:
            note(each)
    # Check the output first: it makes no sense to download a tokenizer and weights for a folder
    # that cannot be written to.
    check_output(job)
    with disk_errors(job.output):
        locks.enter_context(locked(job.lock, f"calibrating {job.output}"))
    progress("reading the text", 0, 0)
    text = read_text(planned)
    if note and text and text.note:
        note(text.note)
    folders.check_room(job.output, 2 * planned.artifact_bytes)  # with a checkpoint
    if planned.needs_weights:
        fetch_weights(source, progress)

    identity = identify_job(job, source, text)
    checkpoint = Checkpoint(job.checkpoint, identity)
    # `--restart` deletes an earlier run only under the lock and once the weights are there, so a
    # failed download loses nothing.
    if job.restart:
        checkpoint.remove()
    finished = finished_artifact(job, identity)
    if finished is not None:
        return finished

    if planned.needs_weights:
        with loading.forward_errors(job.model, job.batch, job.recipe.data.length):
            result = run_model(planned, text, checkpoint, progress, note)
    else:  # the shapes are enough
        assert planned.geometry is not None
        rotations = fit(None, job.recipe, planned.geometry)
        result = CalibrationResult(job.recipe, planned.geometry, rotations)
    seconds = time.monotonic() - started
    content = manifest_content(planned, result, identity, versions, seconds)
    averages = None if result.statistics is None else average(result.statistics)
    artifact = write_sound_artifact(job.output, result.rotations, averages, content, FETCH_AGAIN)
    # Remove the checkpoint last: a process killed before this line leaves both the artifact and the
    # checkpoint.
    checkpoint.remove()
    remember_model(artifact.manifest.model, source.name)
    return artifact


def read_text(planned: Plan) -> Corpus | None:
    """The calibration text; None if the recipe needs no statistics. Raises `RotationZooError` as
    `read_corpus`."""
    recipe = planned.job.recipe
    if not recipe.needs_statistics:
        return None
    fetch(planned.source, weights=False)
    assert planned.config is not None
    data = recipe.data.model_copy(update={"date": recipe.data.date or planned.job.earlier("date")})
    if data.media:
        return read_media_corpus(data, loading.load_processor(planned.source), planned.config)
    text = read_corpus(data, loading.load_tokenizer(planned.source))
    loading.check_ids(text.rows, planned.config, planned.source.name)
    return text


# ---- the part that needs the weights


@dataclass(frozen=True)
class CalibrationResult:
    """The result of a run."""

    recipe: Recipe
    """The recipe that was followed. Keys keep their mean if the loaded model shows that they must;
    `notes` then say so."""
    geometry: Geometry
    rotations: Rotations
    statistics: Statistics | None = None
    text: Corpus | None = None
    dtype: str | None = None
    """The dtype that the model was loaded in; None if it was not loaded."""
    notes: Sequence[str] = ()


def run_model(
    planned: Plan, text: Corpus | None, checkpoint: Checkpoint, progress: Progress, note: Note
) -> CalibrationResult:
    """Load the model and calibrate it, or only find its geometry where the recipe needs no text.
    The `checkpoint` is what a stopped run left, and where this run saves. `note` is told how long
    it takes."""
    job = planned.job
    assert planned.config is not None
    placing = place_weights(job.device_map, job.max_memory, planned.pass_bytes)
    with placing as placement:
        progress("loading the model", 0, 0)
        # Only its decoder runs, unless predictions are compared.
        how = job.torch_device, job.torch_dtype, placement, bool(job.recipe.budget)
        model = loading.load(planned.source, planned.config, *how)
        # The first few tokens of the text, or zeros if there is none.
        row = torch.zeros(_CHECKED_TOKENS, dtype=torch.long) if text is None else text.rows[0]
        ids = row[None, :_CHECKED_TOKENS].to(loading.input_device(model))
        geometry = planned.geometry
        if geometry is None:  # which `meta` could not show
            geometry = geometry_of(model, ids)
            check_recipe(job.recipe, geometry)
        dtype = str(model.dtype).removeprefix("torch.")
        if text is None:
            rotations = fit(None, job.recipe, geometry)
            return CalibrationResult(job.recipe, geometry, rotations, dtype=dtype)

        progress("checking the capture", 0, 0)
        with torch.no_grad():
            logits = check_transparent(model, ids)
            if not getattr(model, loading.HEADLESS, False):
                prediction.check_finite(model, logits, partial(model, input_ids=ids))
        recipe, notes = settle_centering(job.recipe, shifted_layers(geometry))
        if recipe.budget:
            try:
                check_cache(model, ids)
            except UnsupportedModel as error:
                if not job.fit_budget:
                    raise
                recipe, reason = without_budget(recipe), str(error)
                notes.append(f"all layers have 2-bit codes with scales: {reason}")
        if not (text.media or getattr(model, loading.HEADLESS, False)):
            guessed = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
            notes += prediction.doubt_loss(guessed.item(), logits.shape[-1])
        texts = []
        if recipe.budget:
            texts = write_texts(text.rows, recipe, loading.load_tokenizer(planned.source))
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        tokens = text.tokens + sum(each.count_passes(layers) for each in texts)
        _tell_time(model, job, text.rows[0], tokens, note)
        batches = text.media or text.batches(job.batch)
        statistics = collect(model, geometry, batches, recipe, checkpoint, progress)
        progress("composing rotations", 0, 0)
        rotations = fit(statistics, recipe, geometry)
        if recipe.budget:
            rotations = measure_sensitivities(
                model, geometry, rotations, texts, recipe.group_size, progress
            )
            rotations = spend_bits(rotations, recipe.budget, recipe.group_size)
        notes += loading.notes_of(model)
        return CalibrationResult(recipe, geometry, rotations, statistics, text, dtype, notes)


@torch.no_grad()
def _tell_time(
    model: PreTrainedModel, job: Job, row: torch.Tensor, tokens: int, note: Note
) -> None:
    """Tell how long the model takes for `tokens` tokens and for the questions after them, by the
    pace of a row's first tokens, unless it is short. Spread weights would be fetched once more."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    ids, begun = row[None, :_PACED_TOKENS], time.monotonic()
    read_row(model, ids)
    pace = (time.monotonic() - begun) / ids.numel()
    least, most = (duration(each * pace) for each in job.asked_tokens)
    asked = f"; questions after that, from {least} to {most}" * any(job.asked_tokens)
    if note and (asked or tokens * pace > _SHORT):
        note(f"the passes through the model{finish(tokens * pace)}{asked}")


# ---- what the manifest records


def identify_job(job: Job, source: Source, text: Corpus | None) -> dict[str, str]:
    """The job's identity: everything that decides the bytes of the result, which is only the recipe
    and the config where these need no `text`."""
    identity = {
        "recipe": job.recipe.hash,
        "config": hash_config(source.folder),
        "weights": "",
        "text": "",
    }
    if text is None:
        return identity
    identity |= {
        "weights": weights_fingerprint(source),
        "text": text.fingerprint,
        "batch": str(job.batch),
        "device": device_name(job.torch_device),
        "dtype": str(job.torch_dtype),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    # On a CPU, floating-point sums depend on how many threads share them.
    threads = torch.get_num_threads() if job.torch_device == "cpu" else None
    optional = {"threads": threads, "device_map": job.device_map, "max_memory": job.max_memory}
    optional["date"] = text.date
    return identity | {key: str(value) for key, value in optional.items() if value is not None}


def manifest_content(
    planned: Plan,
    result: CalibrationResult,
    identity: Identity,
    versions: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    """The content of the manifest, without the keys that are added when it is written. `versions`
    are those of libraries when the job started, and `seconds` is how long it took."""
    assert planned.config is not None
    job = planned.job
    return {
        "model": loading.describe(planned.source, planned.config, identity["weights"] or None),
        "geometry": geometry_json(result.geometry),
        "recipe": result.recipe.published(),
        "recipe_sha256": result.recipe.hash,
        "notes": [*planned.notes, *result.notes],
        "calibration": None if result.text is None else _describe_text(job, result.text),
        "identity": dict(identity),
        "versions": versions,
        "run": {
            "device": device_name(job.torch_device),
            "threads": torch.get_num_threads(),
            "dtype": result.dtype,
            "batch": job.batch,
            "seconds": round(seconds, 3),
            "peak_memory_bytes": peak_memory(),
        },
        "metrics": {"orthogonality_error": result.rotations.orthogonality_error},
    }


def _describe_text(job: Job, text: Corpus) -> dict[str, Any]:
    """The source of the calibration text, and the fingerprint that identifies it."""
    data = job.recipe.published()["data"]
    description = {key: data[key] for key in _DATA_KEYS}
    if text.media:
        media_tokens = sum(int(row.is_media.sum()) for row in text.media)
        description |= {"media_tokens": media_tokens, "text_tokens": text.tokens - media_tokens}
    return description | {
        "tokens": text.tokens,
        "rows": len(text.rows),
        "fingerprint": text.fingerprint,
        "note": text.note,
    }
