"""Runs one calibration, from a model's name to an artifact on disk. Stopped runs can be resumed."""

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
from rotationzoo.calibration.checkpoint import Checkpoint, Identity, asked_recipe, finished_artifact
from rotationzoo.calibration.collect import collect, read_row
from rotationzoo.calibration.fisher import add_fisher, check_backward, choose_texts, count_passes
from rotationzoo.calibration.plan import Job, Plan, device_name, peak_memory, plan, settle_centering
from rotationzoo.calibration.sensitivity import add_attention_metric, check_cache, write_texts
from rotationzoo.calibration.soundness import FETCH_AGAIN, check_recipe, write_sound_artifact
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.errors import RotationZooError, Unsound
from rotationzoo.geometry import Geometry, geometry_json
from rotationzoo.linalg.moments import Statistics, average
from rotationzoo.model import loading, prediction
from rotationzoo.model.capture import check_transparent
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.placement import place_weights
from rotationzoo.model.source import fetch, fetch_weights, remember_model, weights_fingerprint
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Data, Recipe
from rotationzoo.rotations import Rotations
from rotationzoo.storage import folders
from rotationzoo.storage.files import disk_errors
from rotationzoo.storage.folders import locked, recover
from rotationzoo.text.rows import Corpus, read_corpus, read_media_corpus
from rotationzoo.words import finish
from rotationzoo.writer import check_replaceable, library_versions

Note = Callable[[str], None] | None
_PACED_TOKENS = 128  # of the first row; one pass over them is timed
_SHORT = 30  # seconds; a shorter job needs no estimate
_CHECKED_TOKENS = 32  # of the first row; their logits are compared with and without capture
_DATA_KEYS = ("source", "subset", "split", "column", "packing", "length", "seed")


def check_output(job: Job) -> None:
    """Raise `RotationZooError` unless the output is writable and may be replaced."""
    with disk_errors(job.output):
        recover(job.output)
        check_replaceable(job.output)
        if (job.output / MANIFEST).is_file():
            artifact = Artifact.open(job.output)
            if not (job.restart or job.unfinished or asked_recipe(artifact) == job.recipe.hash):
                made = f"{artifact.recipe.name} for {artifact.manifest.model.id}"
                problem = f"{job.output} holds the work of another recipe or text ({made})"
                hint = "choose another place with --output, or replace it with --restart"
                raise RotationZooError(problem, hint)
    folders.check_writable(job.output)


def calibrate(job: Job, progress: Progress = silent, note: Note = None) -> Artifact:
    """Run a job, or resume it from its checkpoint, and return its artifact. `note` is told how the
    job differs from the request. Raises `RotationZooError` as early as possible."""
    with ExitStack() as locks:
        try:
            return _calibrate(job, progress, note, locks)
        except Unsound:
            # Resuming from the same sums would fail the same way.
            Checkpoint(job.checkpoint, {}).remove()
            raise


def _calibrate(job: Job, progress: Progress, note: Note, locks: ExitStack) -> Artifact:
    """Run the job under a lock, which `locks` holds until the end."""
    started = time.monotonic()
    progress("looking at the model", 0, 0)
    planned = plan(job)
    if planned.refusal is not None:
        raise planned.refusal
    job, source = planned.job, planned.source
    if note:
        for each in planned.notes:
            note(each)
    # Check the output first: nothing is downloaded for a folder that cannot be written to.
    check_output(job)
    lock = job.checkpoint.with_name(f".{job.checkpoint.name}.lock")
    with disk_errors(job.output):
        locks.enter_context(locked(lock, f"calibrating {job.output}"))
    progress("reading the text", 0, 0)
    text = read_text(planned)
    if note and text and text.note:
        note(text.note)
    folders.check_room(job.output, 2 * planned.artifact_bytes)  # with a checkpoint
    if planned.needs_weights:
        fetch_weights(source, progress)

    identity = identify_job(planned, text)
    checkpoint = Checkpoint(job.checkpoint, identity)
    # `--restart` deletes the earlier run only now, so that a failed download loses nothing.
    if job.restart:
        checkpoint.remove()
    replaces = job.restart or job.unfinished
    if (finished := finished_artifact(job.output, replaces, identity)) is not None:
        return finished

    if planned.needs_weights:
        with loading.forward_errors(job.model, job.batch, job.recipe.data.length):
            result = run_model(planned, text, checkpoint, progress, note)
    else:  # the shapes are enough
        assert planned.geometry is not None
        rotations = fit(None, job.recipe, planned.geometry)
        result = CalibrationResult(job.recipe, planned.geometry, rotations)
    content = manifest_content(planned, result, identity, time.monotonic() - started)
    averages = None if result.statistics is None else average(result.statistics)
    artifact = write_sound_artifact(job.output, result.rotations, averages, content, FETCH_AGAIN)
    # Last, so that a process killed before this line leaves the checkpoint too.
    checkpoint.remove()
    remember_model(artifact.manifest.model, source.name)
    return artifact


def read_text(planned: Plan) -> Corpus | None:
    """The text, or None if the recipe needs no statistics. Raises what `read_corpus` raises."""
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


@dataclass(frozen=True)
class CalibrationResult:
    """The result of a run."""

    recipe: Recipe
    """The recipe that was used. If keys kept their mean despite `center_keys`, `notes` say so."""
    geometry: Geometry
    rotations: Rotations
    statistics: Statistics | None = None
    text: Corpus | None = None
    dtype: str | None = None  # the dtype that the model was loaded in; None if it was not loaded
    notes: Sequence[str] = ()


def run_model(
    planned: Plan, text: Corpus | None, checkpoint: Checkpoint, progress: Progress, note: Note
) -> CalibrationResult:
    """Load the model and calibrate it, or only read its geometry without a text."""
    job = planned.job
    assert planned.config is not None
    with place_weights(job.device_map, job.max_memory, planned.pass_bytes) as placement:
        progress("loading the model", 0, 0)
        # Without a budget of bits, only the decoder runs.
        how = job.torch_device, job.torch_dtype, placement, bool(job.recipe.budget)
        model = loading.load(planned.source, planned.config, *how)
        headless = getattr(model, loading.HEADLESS, False)
        # The first few tokens of the text, or zeros if there is none.
        row = torch.zeros(_CHECKED_TOKENS, dtype=torch.long) if text is None else text.rows[0]
        ids = row[None, :_CHECKED_TOKENS].to(loading.input_device(model))
        geometry = planned.geometry
        if geometry is None:  # it could not be read on `meta`
            geometry = geometry_of(model, ids)
            check_recipe(job.recipe, geometry)
        dtype = str(model.dtype).removeprefix("torch.")
        if text is None:
            rotations = fit(None, job.recipe, geometry)
            return CalibrationResult(job.recipe, geometry, rotations, dtype=dtype)

        progress("checking the capture", 0, 0)
        with torch.no_grad():
            logits = check_transparent(model, ids)
            if not headless:
                prediction.check_finite(model, logits, partial(model, input_ids=ids))
        recipe, notes = settle_centering(job.recipe, geometry)
        check_backward(model, geometry, ids[0], recipe)
        measures = recipe.transform and not recipe.goes_back
        if measures:
            check_cache(model, ids)
        if not (text.media or headless):
            guessed = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
            notes += prediction.doubt_loss(guessed.item(), logits.shape[-1])
        texts, rows = [], text.rows
        if recipe.transform:
            tokenizer = loading.load_tokenizer(planned.source)
            if text.media:  # predictions are compared without images and audio
                size = recipe.data.model_dump(include={"tokens", "length", "seed"})
                rows = read_corpus(Data(**size), tokenizer).rows
            texts = write_texts(rows, recipe, tokenizer)
        scored = choose_texts(rows, texts, recipe, job.torch_device == "cpu")
        tokens = text.tokens + count_passes(scored, recipe)
        if measures:
            layers = model.config.get_text_config(decoder=True).num_hidden_layers
            tokens += sum(each.count_passes(layers) for each in texts)
        _tell_time(model, text.rows[0], tokens, note)
        batches = text.media or text.batches(job.batch)
        statistics = collect(model, geometry, batches, recipe, checkpoint, progress)
        if scored:
            add_fisher(statistics, model, geometry, scored, recipe, progress)
        if measures:
            add_attention_metric(statistics, model, geometry, texts, recipe, progress)
        progress("composing rotations", 0, 0)
        rotations = spend_bits(fit(statistics, recipe, geometry), recipe.budget)
        return CalibrationResult(recipe, geometry, rotations, statistics, text, dtype, notes)


@torch.no_grad()
def _tell_time(model: PreTrainedModel, row: torch.Tensor, tokens: int, note: Note) -> None:
    """Note how long `tokens` tokens take, estimated from a few, unless the time is short."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # offloaded weights would be fetched once more
    ids, begun = row[None, :_PACED_TOKENS], time.monotonic()
    read_row(model, ids)
    pace = (time.monotonic() - begun) / ids.numel()
    if note and tokens * pace > _SHORT:
        note(f"the passes through the model{finish(tokens * pace)}")


def identify_job(planned: Plan, text: Corpus | None) -> dict[str, str]:
    """The job's identity: everything that decides its bytes."""
    job, source = planned.job, planned.source
    identity = {"recipe": job.recipe.hash, "config": hash_config(source.folder)}
    if text is None:
        return identity | {"weights": "", "text": ""}
    identity |= {
        "weights": weights_fingerprint(source),
        "text": text.fingerprint,
        "batch": str(job.batch),
        "device": device_name(job.torch_device),
        "dtype": str(job.torch_dtype),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    # On a CPU, floating-point sums depend on the number of threads.
    threads = torch.get_num_threads() if job.torch_device == "cpu" else None
    optional = {"threads": threads, "device_map": job.device_map, "max_memory": job.max_memory}
    optional["date"] = text.date
    return identity | {key: str(value) for key, value in optional.items() if value is not None}


def manifest_content(
    planned: Plan, result: CalibrationResult, identity: Identity, seconds: float
) -> dict[str, Any]:
    """The manifest's content, for a job that took `seconds`."""
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
        "versions": library_versions(),
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
    """The `calibration` table of the manifest: the text's source, size and fingerprint."""
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
