"""Which models have a new revision, and new rotations for one of them, published only if they are
no worse than the old."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rotationzoo import recipe as recipes
from rotationzoo.artifact.plots import report as report_pictures
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.kernel import Validation, validate_kernel
from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.evaluation.job import Evaluation, evaluate
from rotationzoo.linalg.paired import paired_difference
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Recipe
from rotationzoo.zoo import lookup
from rotationzoo.zoo import pull as pulling
from rotationzoo.zoo.hubs import HuggingFace
from rotationzoo.zoo.index import Entry, Index
from rotationzoo.zoo.lookup import Found

# a relative increase of perplexity that matters, if it is also more than two standard errors
_WORSE = 1e-3
_MATTERS = (
    ".safetensors",
    ".jinja",
    ".model",
)  # and every .json: config, tokenizer, index of the shards


@dataclass(frozen=True)
class Due:
    """A model whose rotations are to be made anew."""

    model: str
    revision: str
    was: str | None
    """The revision of the published rotations."""
    recipe: str
    """The recipe file."""
    reason: str


def published(place: str | None, repo: str, hub_name: str) -> Found:
    """The index to compare with: at `place`, or else the repository's own.

    Nothing is published only where the hub says that there is no such repository, or no index in
    it: raises `HubError` for whatever else keeps it from answering.
    """
    if place is not None:
        return lookup.find_index(place, repo)
    try:
        return lookup.read_index(repo, hub_name)
    except HubError as error:
        if not error.missing:
            raise
        return Found(Index(), f"no index: {error}")


def due(configs: Path, index: Index) -> tuple[list[Due], dict[str, HubError]]:
    """The models of a folder of recipe files whose weights, config or recipe differ from what was
    published, and why the others are not known that could not be looked at.

    Asks Hugging Face for each model. Raises `HubError` if it says nothing of any.
    """
    hub, models = (
        HuggingFace(),
        [recipe for path in sorted(configs.glob("*.yaml")) if (recipe := _for_a_model(path))],
    )

    def look(found: tuple[Path, Recipe]) -> Due | HubError | None:
        path, recipe = found
        model = recipe.model or ""
        try:
            revision, contents = hub.contents(model)
            published = newest(index, model)
            reason = _reason(hub, recipe, published, revision, contents)
        except HubError as error:
            return error
        was = published.model_revision if published else None
        return Due(model, revision, was, str(path), reason) if reason else None

    with ThreadPoolExecutor(8) as pool:  # each may have to wait for an answer that does not come
        answers = list(pool.map(look, models))
    unknown = {
        recipe.model or "": a
        for (_, recipe), a in zip(models, answers, strict=True)
        if isinstance(a, HubError)
    }
    if unknown and len(unknown) == len(models):
        raise next(iter(unknown.values()))
    return [answer for answer in answers if isinstance(answer, Due)], unknown


def _for_a_model(path: Path) -> tuple[Path, Recipe] | None:
    recipe = recipes.load(str(path))
    return (path, recipe) if recipe.model else None


def recipe_of(configs: Path, model: str | None) -> Path:
    """The recipe file of a model, or any for None. Raises `RotationZooError` if the folder has
    none."""
    files = sorted(configs.glob("*.yaml"))
    if not files:
        raise RotationZooError(
            f"there are no recipe files in {configs}",
            hint="name the folder of yours with --configs",
        )
    for path in files:
        if model is None or recipes.load(str(path)).model == model:
            return path
    raise RotationZooError(
        f"{configs} has no recipe for {model}",
        hint=f"write {configs}/{(model or '').split('/')[-1]}.yaml first",
    )


def newest(index: Index, model: str) -> Entry | None:
    """The latest of our own entries for a model."""
    ours = [
        entry for entry in index.entries if entry.model == model and entry.format == "rotationzoo"
    ]
    return max(ours, key=lambda entry: entry.created or "", default=None)


def _reason(
    hub: HuggingFace,
    recipe: Recipe,
    published: Entry | None,
    revision: str,
    contents: dict[str, str],
) -> str | None:
    if published is None:
        return "nothing is published"
    kept = recipe.model_copy(
        update={"center_keys": False}
    )  # what a search makes where keys cannot be centred
    if published.recipe_sha256 not in (recipe.hash, kept.hash if recipe.search else recipe.hash):
        return "the recipe has changed"
    if published.model_revision == revision:
        return None
    try:
        _, before = hub.contents(recipe.model or "", published.model_revision)
    except HubError as error:
        if not error.missing:
            raise
        return "the published revision is gone"
    changed = sorted(
        name
        for name in before.keys() | contents.keys()
        if _matters(name) and before.get(name) != contents.get(name)
    )
    return f"changed: {', '.join(changed[:3])}" if changed else None


def _matters(name: str) -> bool:
    return "/" not in name and name.endswith((*_MATTERS, ".json"))


def regenerate(
    job: Job, found: Found, evaluation: Evaluation, progress: Progress = silent
) -> dict[str, Any]:
    """Calibrate, evaluate beside the published rotations if there are any, and validate. The
    artifact is then ready to publish.

    `evaluation` says on what text and how; its model and artifacts are filled in here. Raises
    `RotationZooError` if the new rotations are worse than the old on the new revision.
    """
    made = calibrate(job, progress)
    old = _published(found, job.model, progress)
    if old is not None and Artifact.open(old).identity == made.identity:
        old = None
    artifacts = [made.folder, *([old] if old else [])]
    report = evaluate(_filled(evaluation, job, artifacts), progress)
    arms = list(report["arms"])
    verdict: dict[str, Any] = {
        "artifact": str(made.folder),
        "identity": made.identity,
        "compared_with": str(old) if old else None,
    }
    if old is not None:
        new, before = (report["arms"][name]["text_losses"] for name in arms[:2])
        difference, error = paired_difference(new, before, report["exact"]["text_tokens"])
        verdict |= {"log_perplexity_difference": difference, "standard_error": error}
        if is_worse(difference, error):
            raise RotationZooError(
                f"the new rotations of {job.model} are worse than the published ones: perplexity {math.expm1(difference):+.2%} "
                f"on the new revision" + ("" if error is None else f", standard error {error:.2%}"),
                hint=f"look at {made.folder} before you publish it with: rotationzoo push",
            )
    if find_spec("matplotlib"):
        report_pictures(Artifact.open(made.folder))
    on_device = Validation(device=job.device)
    validated = validate_kernel(Artifact.open(made.folder), on_device, progress)
    return verdict | {
        "report": report,
        "validated_on": validated["device"] if validated["on_gpu"] else None,
    }


def is_worse(difference: float, error: float | None) -> bool:
    """Whether a difference of log perplexities matters and is no accident: over .1 %, and over two
    standard errors."""
    return math.expm1(difference) > _WORSE and (error is None or difference > 2 * error)


def _published(found: Found, model: str, progress: Progress) -> Path | None:
    entry = newest(found.content, model)
    if entry is None:
        return None
    return pulling.pull(found, entry, entry.copies[0], progress=progress).path


def _filled(evaluation: Evaluation, job: Job, artifacts: list[Path]) -> Evaluation:
    shared = {
        key: getattr(job, key)
        for key in ("model", "revision", "device", "dtype", "device_map", "max_memory")
    }
    return replace(evaluation, artifacts=artifacts, save_to=artifacts[:1], **shared)
