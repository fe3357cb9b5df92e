"""The part of a calibration under torchrun that every process but process 0 does."""

from rotationzoo import ranks
from rotationzoo.calibration.checkpoint import Checkpoint, rank_file
from rotationzoo.calibration.identity import differences
from rotationzoo.calibration.job import read_source_text
from rotationzoo.calibration.model_run import collect_share
from rotationzoo.calibration.plan import Job, plan
from rotationzoo.calibration.record import identify_job
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.model import loading
from rotationzoo.model.source import fetch
from rotationzoo.recipe import SELF
from rotationzoo.words import differing

# What must agree between processes. Their GPUs may differ.
_PARTS = ("recipe", "config", "weights", "text", "batch", "dtype", "versions")


def contribute(job: Job) -> None:
    """Do the share of this process in a job that process 0 runs with `calibrate`: sums of its text.

    Waits until process 0 has checked the job and fetched the model. Does nothing if the artifact is
    finished, or if the recipe needs no statistics. Raises as `calibrate` does.
    """
    ranks.listen("begin")  # the model's config and tokenizer are there
    planned = plan(job)
    if planned.refusal is not None:
        raise planned.refusal
    text = read_source_text(planned)
    first = ranks.listen("job")  # the weights are there, and no older checkpoint is
    if first is None or text is None:
        return
    fetch(planned.source)
    identity = identify_job(planned.job, planned.source, text)
    if changed := differences(first, identity, _PARTS):
        raise RotationZooError(
            f"process {ranks.rank()} would add sums of another job: {differing(changed)}",
            hint="give every machine the same command, files and versions",
        )
    checkpoint = Checkpoint(rank_file(planned.job.checkpoint, ranks.rank()), identity)
    with loading.forward_errors(job.model, job.batch, job.recipe.data.length):
        collect_share(planned, text, checkpoint)


def check_shareable(job: Job) -> None:
    """Raise `UsageError` for a job that one process has to do alone."""
    alone = None
    if job.recipe.data.source == SELF:
        alone = "the model writes its own text with --data self, which"
    elif job.device_map is not None:
        alone = "--device-map spreads one model over all devices, which"
    if alone is not None:
        raise UsageError(
            f"{alone} processes cannot share yet",
            hint="start it without torchrun or accelerate launch",
        )
