"""One calibration from a model's name to an artifact on disk: resumable, and silent but for a
progress callback."""

import math
import platform
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from rotationzoo.artifact.store import MANIFEST, Artifact
from rotationzoo.artifact.writer import library_versions
from rotationzoo.cache.windows import Cache
from rotationzoo.calibration import soundness
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import check_recipe, fit, settle_centering
from rotationzoo.calibration.generate import end_tokens, sampling, settings_hash, write
from rotationzoo.calibration.identity import differences
from rotationzoo.calibration.plan import Job, Plan, asked_recipe, check_output, check_room, plan
from rotationzoo.calibration.search.run import search
from rotationzoo.errors import RotationZooError, Unsound
from rotationzoo.linalg.moments import Statistics, average
from rotationzoo.model import loading
from rotationzoo.model.capture import check_transparent
from rotationzoo.model.centering import layers_moved
from rotationzoo.model.geometry import Geometry, geometry_json, geometry_of, shifted_layers
from rotationzoo.model.placement import place_weights
from rotationzoo.model.source import Source, config_hash, fetch, weights_fingerprint
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import SELF, Recipe, digest
from rotationzoo.rotations import Rotations
from rotationzoo.storage.files import disk_errors
from rotationzoo.storage.folders import held
from rotationzoo.text.prompts import read_prompts
from rotationzoo.text.rows import Corpus, pack_texts, read_corpus
from rotationzoo.text.tokenizing import start_tokens

_UNSOUND = "fetch the weights again; activations as large as theirs have no float32 statistics"
_CHECKED_TOKENS = 32  # of the first row, for the comparison of logits with and without capture


def calibrate(job: Job, progress: Progress = silent) -> Artifact:
    """Run a job to its artifact, going on from a checkpoint of the same job where there is one.

    An artifact of the same job that is there already is returned as it is. Raises
    `RotationZooError` with one sentence for everything that a user can mend, and before the passes
    wherever it can be known before.
    """
    missing = [folder for folder in job.output.absolute().parents if not folder.exists()]
    try:
        with ExitStack() as locks:
            return _calibrate(job, progress, locks)
    except BaseException as error:
        if isinstance(
            error, Unsound
        ):  # going on from the sums that led to it would only be refused again
            Checkpoint(job.checkpoint, {}).remove()
        for folder in missing:  # made on the way, and of no use without an artifact or a checkpoint
            with suppress(OSError):
                folder.rmdir()
        raise


def _calibrate(job: Job, progress: Progress, locks: ExitStack) -> Artifact:
    """`locks` keeps other calibrations from the checkpoint and from the artifact's place until all
    is done."""
    started, versions = time.monotonic(), library_versions()
    progress("looking at the model", 0, 0)
    known = plan(job)
    if known.refusal is not None:
        raise known.refusal
    job, source, recipe = known.job, known.source, known.job.recipe
    check_output(job)
    with disk_errors(job.output):
        locks.enter_context(held(job.lock, f"calibrating {job.output}"))
    text = None
    if recipe.needs_statistics:
        fetch(source, weights=False)
        text = (read_prompts if recipe.data.source == SELF else read_corpus)(
            recipe.data, loading.load_tokenizer(source)
        )
        if recipe.data.source != SELF:
            _check_rows(recipe, [len(row) for row in text.rows])
        elif recipe.data.packing != "document":  # known before they are written
            _check_rows(recipe, recipe.data.row_lengths)
    check_room(job, known)
    if text is not None or known.geometry is None:
        progress("fetching the weights", 0, 0)
        fetch(source)
    identity = _identity(job, source, text)
    checkpoint = Checkpoint(job.checkpoint, identity)
    if job.restart:
        checkpoint.remove()
    if (finished := _finished(job, identity)) is not None:
        return finished

    if text is not None or known.geometry is None:
        with loading.forward_errors(job.model, job.batch, recipe.data.length):
            made = _run_model(job, known, text, checkpoint, progress)
    else:
        made = CalibrationResult(
            recipe, known.geometry, None, None, fit(None, recipe, known.geometry)
        )
    assert known.config is not None
    manifest = {
        "model": loading.describe(source, known.config, identity["weights"] or None),
        "geometry": geometry_json(made.geometry),
        "recipe": made.recipe.published(),
        "recipe_sha256": made.recipe.hash,
        "notes": [*known.notes, *made.notes],
        "calibration": _describe(made.text, recipe, identity),
        "identity": identity,
        "versions": versions,
        "run": {
            "device": device_name(job.torch_device),
            "threads": torch.get_num_threads(),
            "dtype": made.dtype,
            "batch": job.batch,
            "seconds": round(time.monotonic() - started, 3),
            "peak_memory_bytes": peak_memory_bytes(),
        },
        "metrics": {"orthogonality_error": made.rotations.orthogonality_error},
    }
    if made.search is not None:
        manifest["search"] = made.search
    averages = None if made.statistics is None else average(made.statistics)
    written = soundness.write(job.output, made.rotations, averages, manifest, _UNSOUND)
    checkpoint.remove()
    return written


def _check_rows(recipe: Recipe, lengths: list[int]) -> None:
    if recipe.search is None:
        return
    if len(lengths) < 3:
        raise RotationZooError(
            f"a search chooses on rows that the statistics have not seen: of {len(lengths)} there are none to spare",
            hint="give at least three: more --tokens, or a shorter --length",
        )
    stored = Cache(sink=recipe.sink, recent=recipe.recent).first_quantized
    if max(lengths[-recipe.search.held_out(len(lengths)) :]) <= stored:
        raise RotationZooError(
            f"no held-out row is longer than {stored} tokens", hint="give longer rows with --length"
        )


def peak_memory_bytes() -> int:
    """The most memory this process has held: of all CUDA devices where they were used, else
    resident in main memory."""
    if torch.cuda.is_available():
        on_device = sum(
            torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())
        )
        if on_device:
            return on_device
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


@dataclass(frozen=True)
class CalibrationResult:
    """What a run of the model leaves. `recipe` is the one that it followed: keys keep their mean
    where the loaded model shows that they must, and `notes` say so."""

    recipe: Recipe
    geometry: Geometry
    statistics: Statistics | None
    dtype: str | None
    rotations: Rotations
    text: Corpus | None = None
    search: dict[str, Any] | None = None
    notes: Sequence[str] = ()


def _run_model(
    job: Job, known: Plan, text: Corpus | None, checkpoint: Checkpoint, progress: Progress
) -> CalibrationResult:
    """Load the model, look at it where `meta` could not, check the capture, let it write, collect
    the statistics, fit and search. `text` holds prompts where the model writes the text itself."""
    geometry, recipe = known.geometry, job.recipe
    assert known.config is not None
    with place_weights(job.device_map, job.max_memory) as placement:
        progress("loading the model", 0, 0)
        predicts = recipe.search is not None or recipe.data.source == SELF
        model = loading.load(
            known.source, known.config, job.torch_device, job.torch_dtype, placement, predicts
        )
        dtype = str(model.dtype).removeprefix("torch.")
        row = text.rows[0] if text is not None else torch.zeros(_CHECKED_TOKENS, dtype=torch.long)
        ids = row[None, :_CHECKED_TOKENS].to(loading.input_device(model))
        if geometry is None:
            geometry = geometry_of(model, ids)
            check_recipe(recipe, geometry)
        if text is None:
            return CalibrationResult(recipe, geometry, None, dtype, fit(None, recipe, geometry))
        progress("checking the capture", 0, 0)
        with torch.no_grad():
            check_transparent(model, ids)
        moved = layers_moved(model, ids) if recipe.center_keys else []
        recipe, notes = settle_centering(recipe, sorted({*shifted_layers(geometry), *moved}))
        if recipe.data.source == SELF:
            text = _written(job, known.source, model, text, checkpoint, progress)
            checkpoint = Checkpoint(
                checkpoint.path, {**checkpoint.identity, "written": text.fingerprint}
            )
        held_out = (
            [] if recipe.search is None else text.rows[-recipe.search.held_out(len(text.rows)) :]
        )
        fitted = replace(text, rows=text.rows[: len(text.rows) - len(held_out)])
        statistics = collect(
            model, geometry, fitted.batches(job.batch), recipe, checkpoint, progress
        )
        progress("composing rotations", 0, 0)
        rotations = fit(statistics, recipe, geometry)
        if recipe.search is None:
            return CalibrationResult(
                recipe, geometry, statistics, dtype, rotations, text, notes=notes
            )
        soundness.check_before_search(rotations, average(statistics), recipe, geometry, _UNSOUND)
        # The deadline counts from here: statistics are a small part of such a job.
        deadline = math.inf if job.budget is None else time.monotonic() + 60 * job.budget
        chosen, record = search(
            model,
            geometry,
            statistics,
            rotations,
            fitted.rows,
            held_out,
            recipe,
            deadline,
            checkpoint,
            progress,
        )
        return CalibrationResult(recipe, geometry, statistics, dtype, chosen, text, record, notes)


def _written(
    job: Job,
    source: Source,
    model: PreTrainedModel,
    prompts: Corpus,
    checkpoint: Checkpoint,
    progress: Progress,
) -> Corpus:
    """The rows that the model writes."""
    data, tokenizer = job.recipe.data, loading.load_tokenizer(source)
    start, ends = len(start_tokens(tokenizer)), end_tokens(model, tokenizer)
    texts = write(
        model,
        prompts.rows,
        data.length,
        data.tokens,
        job.batch,
        sampling(source),
        ends,
        start,
        data.seed,
        checkpoint,
        progress,
    )
    text = pack_texts(texts, data, tokenizer)
    _check_rows(job.recipe, [len(row) for row in text.rows])
    return replace(text, note="; ".join(filter(None, (prompts.note, text.note))) or None)


def _identity(job: Job, source: Source, text: Corpus | None) -> dict[str, str]:
    """What decides the bytes of the result: a checkpoint or a finished artifact must agree with all
    of it."""
    shared = {"recipe": job.recipe.hash, "config": config_hash(source), "weights": "", "text": ""}
    if text is None:
        return shared
    if job.recipe.data.source == SELF:
        shared["sampling"] = ", ".join(
            f"{name} {value}" for name, value in sampling(source).items()
        )
        shared["generation_config"] = settings_hash(source)
        shared["data"] = digest(job.recipe.published()["data"])
    threads = (
        torch.get_num_threads() if job.torch_device == "cpu" else None
    )  # sums depend on how they are split
    chosen = {
        "threads": threads,
        "device_map": job.device_map,
        "max_memory": job.max_memory,
        "budget": job.budget,
    }
    return shared | {
        "weights": weights_fingerprint(source),
        "text": text.fingerprint,
        "batch": str(job.batch),
        "device": device_name(job.torch_device),
        "dtype": str(job.torch_dtype),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        **{key: str(value) for key, value in chosen.items() if value is not None},
    }


def _finished(job: Job, identity: dict[str, str]) -> Artifact | None:
    """The artifact of this very job, if it is there and whole and not about to be replaced."""
    if job.restart or job.unfinished or not (job.output / MANIFEST).is_file():
        return None
    artifact = Artifact.open(job.output)
    theirs = {**artifact.manifest.identity, "recipe": asked_recipe(artifact)}
    if changed := differences(theirs, identity):
        raise RotationZooError(
            f"{job.output} holds the work of another job: {', '.join(changed)} differ",
            hint="choose another place with --output, or replace it with --restart",
        )
    return None if artifact.damaged_files() else artifact


def _describe(
    text: Corpus | None, recipe: Recipe, identity: dict[str, str]
) -> dict[str, Any] | None:
    if text is None:
        return None
    told = ("source", "subset", "split", "column", "packing", "length", "seed")
    data = recipe.published()["data"]
    described = {key: data[key] for key in told}
    if recipe.data.source == SELF:
        described |= {key: data[key] for key in ("prompts", "prompt_tokens")}
        described |= {"prompts_fingerprint": identity["text"], "sampling": identity["sampling"]}
    return described | {
        "tokens": text.tokens, "rows": len(text.rows), "fingerprint": text.fingerprint, "note": text.note
    }  # fmt: skip


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
