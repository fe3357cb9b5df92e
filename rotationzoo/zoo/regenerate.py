"""Finds models that need new rotations because their weights, config or recipe have changed, and
makes rotations that are not worse than the published ones."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rotationzoo.artifact.measured import Measured, MeasuredArm, served_arm
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.kernel import validate_kernel
from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.evaluation.decision import LEVEL, read_correct
from rotationzoo.evaluation.evaluate import evaluate
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.linalg.paired import paired_difference, sign_flip
from rotationzoo.progress import Progress
from rotationzoo.recipe import Recipe
from rotationzoo.recipe import loading as recipes
from rotationzoo.words import change, counted, percent
from rotationzoo.zoo.hubs.huggingface import HuggingFace
from rotationzoo.zoo.index import Entry, Index
from rotationzoo.zoo.lookup import LoadedIndex
from rotationzoo.zoo.ownership import listed_name
from rotationzoo.zoo.pull import pull_first

# Changes of other files, such as the README, and in folders do not affect the rotations.
_SUFFIXES = (".safetensors", ".jinja", ".model", ".json")
_WORSE = 1e-3  # the smallest relative increase of perplexity that matters


@dataclass(frozen=True)
class DueModel:
    """A model that needs new rotations. `was`: the revision of the published ones, if known.
    `recipe`: the path of the recipe file."""

    model: str
    revision: str
    was: str | None
    recipe: str
    reason: str


def find_due(configs: Path, index: Index) -> tuple[list[DueModel], dict[str, RotationZooError]]:
    """The models that are due, and model -> error for those that could not be checked. `configs`: a
    folder of recipe files, or one file. Raises `RotationZooError` if no model could be checked."""
    loaded = {path: recipes.load(str(path)) for path in _recipe_files(configs)}
    of_models = {path: recipe for path, recipe in loaded.items() if recipe.model}
    hub, due, errors = HuggingFace(), list[DueModel](), dict[str, RotationZooError]()
    for path, recipe in of_models.items():
        try:
            due += filter(None, [_look_at(hub, index, path, recipe)])
        except RotationZooError as error:
            errors[str(recipe.model)] = error
    if errors and len(errors) == len(of_models):
        raise next(iter(errors.values()))
    return due, errors


def find_recipe_file(configs: Path, model: str | None) -> Path:
    """The recipe file of a model, or the first one without a model. `configs`: as in `find_due`.
    Raises `RotationZooError` if there is no such file."""
    paths = _recipe_files(configs)
    if not paths:
        problem = f"there are no recipe files in {configs}"
        raise RotationZooError(problem, "name your folder with --configs")
    for path in paths:
        named = recipes.load(str(path)).model
        if model is None or (named and os.path.realpath(named) == os.path.realpath(model)):
            return path
    folder = configs.parent if configs.is_file() else configs
    hint = f"write {folder}/{Path(model or '').name}.yaml first, with the line: model: {model}"
    raise RotationZooError(f"{configs} has no recipe for {model}", hint)


def _recipe_files(configs: Path) -> list[Path]:
    return [configs] if configs.is_file() else sorted(configs.glob("*.yaml"))


def find_newest(index: Index, model: str, recipe: Recipe) -> Entry | None:
    """The newest artifact in the index for a model with the recipe's scaling of RoPE, preferably of
    this recipe; None if there is none."""
    artifacts = [each for each in index.entries if each.format == "rotationzoo"]
    wanted = (model, recipe.rope_scaling)
    found = [each for each in artifacts if (each.model, each.rope_scaling) == wanted]
    of_name = [entry for entry in found if entry.recipe == recipe.name]
    return max(of_name or found, key=lambda entry: entry.created or "", default=None)


def _look_at(hub: HuggingFace, index: Index, path: Path, recipe: Recipe) -> DueModel | None:
    model = recipe.model or ""
    revision, hashes = hub.contents(model)
    published = find_newest(index, model, recipe)
    if published is None:
        return DueModel(model, revision, None, str(path), "nothing is published")
    # An artifact's recipe does not center keys that cannot be centered.
    uncentered = recipe.model_copy(update={"center_keys": False})
    due = DueModel(model, revision, published.model_revision, str(path), "the recipe has changed")
    if published.recipe_sha256 not in (recipe.hash, uncentered.hash):
        return due
    if due.was == revision:
        return None
    try:
        _, before = hub.contents(model, due.was)
    except HubError as error:
        if not error.missing:
            raise
        return replace(due, reason="the published revision is gone")
    differing = {name for name, _ in before.items() ^ hashes.items()}
    changed = [name for name in sorted(differing) if "/" not in name and name.endswith(_SUFFIXES)]
    return replace(due, reason=f"changed: {', '.join(changed[:3])}") if changed else None


def regenerate(
    job: Job, loaded: LoadedIndex, evaluation: Evaluation, progress: Progress, publishing: str
) -> dict[str, Any]:
    """Calibrate, evaluate side by side with any published rotations, and validate. Raises
    `RotationZooError`, with the command `publishing` as a hint, if the new rotations are worse."""
    artifact = calibrate(job, progress)
    name, published = listed_name(artifact.manifest.model), None
    entry = find_newest(loaded.content, name, job.recipe)
    if entry is not None and entry.identity != artifact.identity:
        place = pull_first(loaded, entry, entry.copies[:1], progress=progress).path
        published = Artifact.open(place)
    folders = [each.folder for each in (artifact, published) if each is not None]
    # `anyway`, because the published rotations were made for other weights.
    evaluation = replace(evaluation, artifacts=folders, save_to=folders[:1], anyway=True)
    asked = replace(evaluation, model=job.model, **job.run_options)
    report = evaluate(asked, progress)
    verdict: dict[str, Any] = {
        "artifact": str(artifact.folder),
        "identity": artifact.identity,
        "compared_with": str(published.folder) if published else None,
    }
    if published is not None:
        identities = artifact.identity, published.identity
        verdict |= compare_rotations(report, identities, job.model, publishing)
    validated_on = None
    if job.torch_device == "cuda":
        made = Artifact.open(artifact.folder)  # again: the evaluation has changed its manifest
        validated_on = validate_kernel(made, progress=progress)["device"]
    return verdict | {"validated_on": validated_on}


def compare_rotations(
    report: Measured, identities: tuple[str, str], model: str, publishing: str
) -> dict[str, Any]:
    """Compare the new and the published rotations, which have these `identities`. Answers decide,
    or else perplexity. Raises `RotationZooError` if the new ones are worse."""
    arms, format = report.window.arms, report.format
    new, published = (served_arm(arms, identity, format) for identity in identities)
    assert new is not None
    assert published is not None
    answers, fault = _compare_answers(report, new, published), None
    difference, error = paired_difference(
        new.text_losses, published.text_losses, report.exact.text_tokens
    )
    outcome = answers["outcome"] if answers else "unclear"
    is_significant = error is None or difference > 2 * error
    if answers and outcome == "fewer":
        asked = counted(answers["questions"], "question")
        reason = f"{answers['answered']} of {asked} compared with {answers['other_answered']}"
        precision = f"p {answers['answers_p_value']:.2g}"
        fault = f"answer worse than the published ones: {reason}, {precision}"
    elif outcome == "unclear" and is_significant and math.expm1(difference) > _WORSE:
        increase = f"perplexity {change(math.expm1(difference))} on the new revision"
        precision = "" if error is None else f", standard error {percent(error, 2)}"
        fault = f"are worse than the published ones: {increase}{precision}"
    if fault:
        hint = f"to publish them anyway: {publishing}"
        raise RotationZooError(f"the new rotations of {model} {fault}", hint)
    return {"answers": answers, "log_perplexity_difference": difference, "standard_error": error}


def _compare_answers(
    report: Measured, new: MeasuredArm, published: MeasuredArm
) -> dict[str, Any] | None:
    """A comparison of the answers with new and published rotations; None without questions.
    Prompts are compared, because the questions of one prompt share its text."""
    if not new.tasks:
        return None
    sizes = [size for task in new.tasks for size in report.exact.tasks[task].prompts]
    correct, other = read_correct(new.tasks), read_correct(published.tasks)
    gains = (correct.int() - other.int()).split(sizes)
    value, outcome = sign_flip(int(gain.sum()) for gain in gains), "unclear"
    if value < LEVEL:
        outcome = "more" if correct.sum() > other.sum() else "fewer"
    return {
        "arm": new.name,
        "other": published.name,
        "questions": len(correct),
        "answered": int(correct.sum()),
        "other_answered": int(other.sum()),
        "answers_p_value": value,
        "outcome": outcome,
    }
