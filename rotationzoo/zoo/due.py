"""Which models need new rotations: those whose weights, config or recipe have changed."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rotationzoo import recipe as recipes
from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.recipe import Recipe
from rotationzoo.zoo.hubs.huggingface import HuggingFace
from rotationzoo.zoo.index import Entry, Index

_WORKERS = 8  # parallel, because each request may wait until it times out
# Changes to other files, such as the README, do not affect the rotations.
_SUFFIXES = (".safetensors", ".jinja", ".model", ".json")


@dataclass(frozen=True)
class DueModel:
    """A model that needs new rotations."""

    model: str
    revision: str
    was: str | None
    """The model revision that the published rotations were made for; None if nothing is published
    or the index does not say."""
    recipe: str
    """Path of the recipe file."""
    reason: str


def find_due(configs: Path, index: Index) -> tuple[list[DueModel], dict[str, HubError]]:
    """The models that are due, and model -> error for those that could not be checked.

    `configs` is the folder of recipe files, or one of them. Every model is looked up on Hugging
    Face, because models are always fetched from there, whichever hub has their rotations. Raises
    `HubError` if no model could be checked.
    """
    hub = HuggingFace()
    recipes_by_path = {}
    for path in _recipe_files(configs):
        recipe = recipes.load(str(path))
        if recipe.model:
            recipes_by_path[path] = recipe

    def look_at(path: Path) -> DueModel | HubError | None:
        try:
            return _look_at(hub, path, recipes_by_path[path], index)
        except HubError as error:
            return error

    with ThreadPoolExecutor(_WORKERS) as pool:
        answers = list(pool.map(look_at, recipes_by_path))
    due, errors = [], {}
    for recipe, answer in zip(recipes_by_path.values(), answers, strict=True):
        if isinstance(answer, DueModel):
            due.append(answer)
        elif isinstance(answer, HubError):
            errors[recipe.model or ""] = answer
    if errors and len(errors) == len(answers):
        raise next(iter(errors.values()))
    return due, errors


def find_recipe_file(configs: Path, model: str | None) -> Path:
    """The recipe file of a model, or the first file if `model` is None.

    `configs` is the folder of recipe files, or one of them: a model may have several. Raises
    `RotationZooError` if there is no such file.
    """
    paths = _recipe_files(configs)
    if not paths:
        raise RotationZooError(
            f"there are no recipe files in {configs}",
            hint="name the folder of yours with --configs",
        )
    for path in paths:
        if model is None or recipes.load(str(path)).model == model:
            return path
    name = (model or "").split("/")[-1]
    folder = configs.parent if configs.is_file() else configs
    raise RotationZooError(
        f"{configs} has no recipe for {model}", hint=f"write {folder}/{name}.yaml first"
    )


def _recipe_files(configs: Path) -> list[Path]:
    return [configs] if configs.is_file() else sorted(configs.glob("*.yaml"))


def find_newest(index: Index, model: str, recipe: Recipe) -> Entry | None:
    """The newest artifact that the index lists for a model with the recipe's scaling of RoPE, of a
    recipe of this name if there is one; None if it lists none.

    Rotations for another scaling are for another model, and do not compare. A model may have
    several recipes, each of which has its own newest artifact.
    """
    artifacts = []
    for entry in index.entries:
        is_meant = (entry.model, entry.rope_scaling) == (model, recipe.rope_scaling)
        if is_meant and entry.format == "rotationzoo":
            artifacts.append(entry)
    of_name = [entry for entry in artifacts if entry.recipe == recipe.name]
    return max(of_name or artifacts, key=lambda entry: entry.created or "", default=None)


def _look_at(hub: HuggingFace, path: Path, recipe: Recipe, index: Index) -> DueModel | None:
    model = recipe.model or ""
    revision, hashes = hub.contents(model)
    published = find_newest(index, model, recipe)
    if published is None:
        return DueModel(model, revision, None, str(path), "nothing is published")
    reason = _find_reason(hub, recipe, published, revision, hashes)
    if reason is None:
        return None
    return DueModel(model, revision, published.model_revision, str(path), reason)


def _find_reason(
    hub: HuggingFace, recipe: Recipe, published: Entry, revision: str, hashes: dict[str, str]
) -> str | None:
    """The reason why new rotations are needed, or None.

    `hashes` maps the model's files at `revision` to their hashes.
    """
    # The artifact of a model whose keys cannot be centered says so in its recipe.
    followed = recipe, recipe.model_copy(update={"center_keys": False})
    accepted = {each.hash for each in followed}
    if published.recipe_sha256 not in accepted:
        return "the recipe has changed"
    if published.model_revision == revision:
        return None
    try:
        _, before = hub.contents(recipe.model or "", published.model_revision)
    except HubError as error:
        if not error.missing:
            raise
        return "the published revision is gone"
    changed = []
    for name in sorted(before.keys() | hashes.keys()):
        if _matters(name) and before.get(name) != hashes.get(name):
            changed.append(name)
    return f"changed: {', '.join(changed[:3])}" if changed else None


def _matters(name: str) -> bool:
    """Whether a change of this file may change the rotations: a root file with such a suffix."""
    return "/" not in name and name.endswith(_SUFFIXES)
