"""New rotations for a model, compared with the published ones: they must not be worse."""

import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rotationzoo.artifact.plots import add_pictures
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.kernel import Validation, validate_kernel
from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.evaluation.job import Evaluation, evaluate
from rotationzoo.linalg.paired import paired_difference
from rotationzoo.progress import Progress, silent
from rotationzoo.zoo import lookup
from rotationzoo.zoo.due import find_newest
from rotationzoo.zoo.index import Index
from rotationzoo.zoo.lookup import LoadedIndex
from rotationzoo.zoo.pull import pull

_WORSE = 1e-3  # a relative increase of perplexity that matters
_SHARED = ("model", "revision", "device", "dtype", "device_map", "max_memory")
"""Fields that a calibration's job and an evaluation have in common."""


def load_published_index(place: str | None, repo: str, hub_name: str) -> LoadedIndex:
    """The index to compare with: at `place`, or else the repository's own.

    It is empty only where the hub says that there is no such repository, or no index in it. Raises
    `HubError` for whatever else keeps the hub from answering.
    """
    if place is not None:
        return lookup.find_index(place, repo)
    try:
        return lookup.read_index(repo, hub_name)
    except HubError as error:
        if not error.missing:
            raise
        return LoadedIndex(Index(), f"no index: {error}")


def regenerate(
    job: Job, loaded: LoadedIndex, evaluation: Evaluation, progress: Progress = silent
) -> dict[str, Any]:
    """Calibrate, evaluate beside the published rotations if there are any, and validate. The
    artifact is then ready to publish.

    `evaluation` says on what text and how; its model and artifacts are filled in here. Raises
    `RotationZooError` if the new rotations are worse than the published ones on the new revision.
    """
    artifact = calibrate(job, progress)
    published = _pull_published(loaded, job.model, progress)
    if published is not None and Artifact.open(published).identity == artifact.identity:
        published = None  # there is nothing to compare
    folders = [artifact.folder]
    if published is not None:
        folders.append(published)
    report = evaluate(_complete_evaluation(evaluation, job, folders), progress)
    verdict: dict[str, Any] = {
        "artifact": str(artifact.folder),
        "identity": artifact.identity,
        "compared_with": str(published) if published else None,
    }
    if published is not None:
        verdict |= _compare(report, job.model, artifact.folder)
    if find_spec("matplotlib"):
        add_pictures(Artifact.open(artifact.folder))
    # Opened again, because the evaluation and the pictures added to it.
    on_device = Validation(device=job.device)
    validation = validate_kernel(Artifact.open(artifact.folder), on_device, progress)
    return verdict | {
        "report": report,
        "validated_on": validation["device"] if validation["on_gpu"] else None,
    }


def is_worse(difference: float, error: float | None) -> bool:
    """Whether a difference of log perplexities matters and is no accident.

    It matters above 0.1 % of perplexity. It is no accident above two standard errors, where these
    are known.
    """
    is_significant = error is None or difference > 2 * error
    return math.expm1(difference) > _WORSE and is_significant


def _compare(report: dict[str, Any], model: str, folder: Path) -> dict[str, Any]:
    """The difference between the first two arms, the new and the published rotations. Raises
    `RotationZooError` if the new ones are worse."""
    new, old = list(report["arms"].values())[:2]
    difference, error = paired_difference(
        new["text_losses"], old["text_losses"], report["exact"]["text_tokens"]
    )
    if is_worse(difference, error):
        precision = "" if error is None else f", standard error {error:.2%}"
        raise RotationZooError(
            f"the new rotations of {model} are worse than the published ones: "
            f"perplexity {math.expm1(difference):+.2%} on the new revision{precision}",
            hint=f"look at {folder} before you publish it with: rotationzoo push",
        )
    return {"log_perplexity_difference": difference, "standard_error": error}


def _pull_published(loaded: LoadedIndex, model: str, progress: Progress) -> Path | None:
    entry = find_newest(loaded.content, model)
    if entry is None:
        return None
    return pull(loaded, entry, entry.copies[0], progress=progress).path


def _complete_evaluation(evaluation: Evaluation, job: Job, folders: list[Path]) -> Evaluation:
    """The evaluation of these artifacts, saved to the first, with the model as the job has it."""
    shared = {name: getattr(job, name) for name in _SHARED}
    return replace(evaluation, artifacts=folders, save_to=folders[:1], **shared)
