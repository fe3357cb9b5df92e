"""Making new rotations for a model, which must not be worse than the published ones."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rotationzoo.artifact.measured import Measured, MeasuredArm, plain_arm
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.kernel import Validation, validate_kernel
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.job import Evaluation, evaluate
from rotationzoo.evaluation.verdict import judge_answers, prompt_sizes
from rotationzoo.linalg.paired import paired_difference
from rotationzoo.progress import Progress, silent
from rotationzoo.words import change, counted, nats, percent
from rotationzoo.zoo.due import find_newest
from rotationzoo.zoo.lookup import LoadedIndex
from rotationzoo.zoo.pull import pull

_WORSE = 1e-3  # the smallest relative increase of perplexity that matters
_LESS_LIKELY = 0.05  # the smallest loss of log probability that matters, in nats an answer
_SHARED = ("model", "revision", "device", "dtype", "device_map", "max_memory")
"""The fields that `Job` and `Evaluation` share."""


def regenerate(
    job: Job, loaded: LoadedIndex, evaluation: Evaluation, progress: Progress = silent
) -> dict[str, Any]:
    """Calibrate, evaluate next to the published rotations, and validate.

    The artifact is then ready to publish. If nothing is published, it is evaluated alone.
    `evaluation` has the text and the settings; its model and artifacts are filled in here. Raises
    `RotationZooError` if the new rotations are worse than the published ones on the new revision.
    """
    artifact = calibrate(job, progress)
    published = _pull_published(loaded, job, progress)
    if published is not None and published.identity == artifact.identity:
        published = None  # these are the same rotations
    folders = [artifact.folder]
    if published is not None:
        folders.append(published.folder)
    report = evaluate(_complete_evaluation(evaluation, job, folders), progress)
    verdict: dict[str, Any] = {
        "artifact": str(artifact.folder),
        "identity": artifact.identity,
        "compared_with": str(published.folder) if published else None,
    }
    if published is not None:
        identities = artifact.identity, published.identity
        verdict |= compare_rotations(report, identities, job.model, artifact.folder)
    # Open the artifact again, because the evaluation has changed its manifest.
    on_device = Validation(device=job.device)
    validation = validate_kernel(Artifact.open(artifact.folder), on_device, progress)
    return verdict | {"validated_on": validation["device"] if validation["on_gpu"] else None}


def is_worse(difference: float, error: float | None) -> bool:
    """Whether an increase of log perplexity is both large enough to matter and significant.

    It matters above 0.1 % of perplexity. It is significant above two standard errors, or if the
    standard error is unknown.
    """
    is_significant = error is None or difference > 2 * error
    return math.expm1(difference) > _WORSE and is_significant


def compare_rotations(
    report: Measured, identities: tuple[str, str], model: str, folder: Path
) -> dict[str, Any]:
    """Compare the new rotations with the published ones, whose `identities` are these.

    Answers decide. Perplexity decides where neither of the two clearly answers better. Raises
    `RotationZooError` if the new ones are worse.
    """
    new, published = (plain_arm(report.window.arms, identity) for identity in identities)
    assert new is not None, "the new rotations were evaluated"
    assert published is not None, "so were the published ones"
    hint = f"look at {folder} before you publish it with: rotationzoo push"
    answers = _compare_answers(report, new, published)
    if answers is not None and (reason := _fault_of_answers(answers)):
        raise RotationZooError(
            f"the new rotations of {model} answer worse than the published ones: {reason}",
            hint=hint,
        )
    difference, error = paired_difference(
        new.text_losses, published.text_losses, report.exact.text_tokens
    )
    better = answers is not None and answers["outcome"] in ("more", "likelier")
    if not better and is_worse(difference, error):
        precision = "" if error is None else f", standard error {percent(error, 2)}"
        raise RotationZooError(
            f"the new rotations of {model} are worse than the published ones: "
            f"perplexity {change(math.expm1(difference))} on the new revision{precision}",
            hint=hint,
        )
    return {
        "answers": answers,
        "log_perplexity_difference": difference,
        "standard_error": error,
    }


def _compare_answers(
    report: Measured, new: MeasuredArm, published: MeasuredArm
) -> dict[str, Any] | None:
    """How the new rotations answer compared with the published ones; None where nothing was
    asked."""
    answered = {arm.name: arm.tasks for arm in (new, published)}
    prompts = prompt_sizes(report.exact, new.tasks)
    if not prompts:
        return None
    verdict = judge_answers(answered, list(answered), prompts)
    return {**verdict.comparisons[0].model_dump(), "questions": verdict.questions}


def _fault_of_answers(answers: dict[str, Any]) -> str | None:
    """In what the new rotations answer clearly worse; None if they do not."""
    if answers["outcome"] == "fewer":
        count, other = answers["answered"], answers["other_answered"]
        value = answers["answers_p_value"]
        asked = counted(answers["questions"], "question")
        return f"{count} of {asked} beside {other}, p {value:.2g}"
    difference = answers["log_probability_difference"]
    if answers["outcome"] == "less likely" and difference < -_LESS_LIKELY:
        value = answers["log_probability_p_value"]
        return f"right answers have {nats(difference, sign=True)} nats, p {value:.2g}"
    return None


def _pull_published(loaded: LoadedIndex, job: Job, progress: Progress) -> Artifact | None:
    entry = find_newest(loaded.content, job.model, job.recipe)
    if entry is None:
        return None
    return Artifact.open(pull(loaded, entry, entry.copies[0], progress=progress).path)


def _complete_evaluation(evaluation: Evaluation, job: Job, folders: list[Path]) -> Evaluation:
    """The evaluation of these artifacts on the job's model, saved to the first artifact."""
    shared = {name: getattr(job, name) for name in _SHARED}
    return replace(evaluation, artifacts=folders, save_to=folders[:1], **shared)
