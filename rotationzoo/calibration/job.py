"""Runs one whole calibration, from a model's name to an artifact on disk.

A job can be stopped and resumed. It prints nothing; a callback reports its progress.
"""

import time
from contextlib import ExitStack, suppress

from rotationzoo import ranks
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.model_run import CalibrationResult, run_model
from rotationzoo.calibration.output import check_output, check_room, finished_artifact
from rotationzoo.calibration.plan import Job, Plan, plan
from rotationzoo.calibration.record import identify_job, manifest_content
from rotationzoo.calibration.soundness import FETCH_AGAIN, write_sound_artifact
from rotationzoo.errors import Unsound
from rotationzoo.linalg.moments import average
from rotationzoo.model import loading
from rotationzoo.model.fetching import fetch_weights
from rotationzoo.model.source import fetch
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import SELF
from rotationzoo.storage.files import disk_errors
from rotationzoo.storage.locks import locked
from rotationzoo.text.prompts import read_prompts
from rotationzoo.text.rows import Corpus, read_corpus
from rotationzoo.writer import library_versions


def calibrate(job: Job, progress: Progress = silent) -> Artifact:
    """Run a job, resuming from a checkpoint of the same job if there is one, and return its
    artifact.

    If the finished artifact of the same job is already there, it is returned unchanged. Raises
    `RotationZooError`, with one sentence, for everything that a user can put right. Whatever can be
    known before the passes through the model is raised before them.
    """
    # Listed before the job creates any of them.
    missing = [folder for folder in job.output.absolute().parents if not folder.exists()]
    try:
        with ExitStack() as locks:
            return _calibrate(job, progress, locks)
    except BaseException as error:
        if isinstance(error, Unsound):
            # Resuming from the same sums would only be refused again.
            Checkpoint(job.checkpoint, {}).remove()
        for folder in missing:
            # Remove the folders that the job created. `rmdir` fails for one that holds an artifact
            # or a checkpoint, which stays.
            with suppress(OSError):
                folder.rmdir()
        raise


def _calibrate(job: Job, progress: Progress, locks: ExitStack) -> Artifact:
    """Run the job under a lock, which `locks` holds until the end.

    Meanwhile no other calibration may touch the checkpoint or the artifact's folder.
    """
    started, versions = time.monotonic(), library_versions()
    progress("looking at the model", 0, 0)
    planned = plan(job)
    if planned.refusal is not None:
        raise planned.refusal
    job, source = planned.job, planned.source

    # Check the output first: it makes no sense to download a tokenizer and weights for a folder
    # that cannot be written to.
    check_output(job)
    with disk_errors(job.output):
        locks.enter_context(locked(job.lock, f"calibrating {job.output}"))
    progress("reading the text", 0, 0)
    source_text = read_source_text(planned)
    check_room(planned)
    if planned.needs_weights:
        fetch_weights(source, progress)

    identity = identify_job(job, source, source_text)
    checkpoint = Checkpoint(job.checkpoint, identity)
    # `--restart` deletes an earlier run only under the lock and once the weights are there, so a
    # failed download loses nothing.
    if job.restart:
        checkpoint.remove()
    finished = finished_artifact(job, identity)
    # Other processes wait for this: only now the weights are there, and no older checkpoint is.
    shares = finished is None and job.recipe.needs_statistics
    ranks.tell("job", identity if shares else None)
    if finished is not None:
        return finished

    result = _run(planned, source_text, checkpoint, progress)
    seconds = time.monotonic() - started
    content = manifest_content(planned, result, identity, versions, seconds)
    averages = None if result.statistics is None else average(result.statistics)
    artifact = write_sound_artifact(job.output, result.rotations, averages, content, FETCH_AGAIN)
    # Remove the checkpoint last: a process killed before this line leaves both the artifact and the
    # checkpoint.
    checkpoint.remove()
    return artifact


def read_source_text(planned: Plan) -> Corpus | None:
    """Read the calibration text, or the prompts if the model writes the text itself.

    None if the recipe needs no statistics.
    """
    recipe, data = planned.job.recipe, planned.job.recipe.data
    if recipe.needs_statistics:
        fetch(planned.source, weights=False)
    # Other processes find config and tokenizer here, and read the text at the same time.
    ranks.tell("begin")
    if not recipe.needs_statistics:
        return None
    tokenizer = loading.load_tokenizer(planned.source)
    if data.source == SELF:
        return read_prompts(data, tokenizer)
    return read_corpus(data, tokenizer)


def _run(
    planned: Plan, source_text: Corpus | None, checkpoint: Checkpoint, progress: Progress
) -> CalibrationResult:
    """Run the model, or compose the rotations without it if its shapes are enough."""
    job = planned.job
    if not planned.needs_weights:
        assert planned.geometry is not None
        return CalibrationResult(
            job.recipe, planned.geometry, fit(None, job.recipe, planned.geometry)
        )
    with loading.forward_errors(job.model, job.batch, job.recipe.data.length):
        return run_model(planned, source_text, checkpoint, progress)
