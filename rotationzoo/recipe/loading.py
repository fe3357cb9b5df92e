"""Loading a recipe: from its name, from a YAML file, or with the command line's flags applied."""

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.recipe.presets import PRESETS
from rotationzoo.recipe.schema import Data, Recipe
from rotationzoo.recipe.search import Search
from rotationzoo.recipe.section import Section
from rotationzoo.storage import strict_yaml
from rotationzoo.words import nearest, shortened

_SECTIONS = {"data": "source and tokens", "search": "prompts and steps"}
"""Section of a recipe -> examples of its keys."""


def load(recipe: str) -> Recipe:
    """Load a preset by name, or a YAML file. A file may start from a preset with `extends: oscar`
    and change some of its keys.

    Raises `RotationZooError`, which names the file, the key and what is wrong with it.
    """
    if recipe in PRESETS:
        return PRESETS[recipe]
    path = Path(recipe)
    if not os.path.isfile(path):  # not `Path.is_file`, which raises for a name of many characters
        raise RotationZooError(
            f"there is no recipe {shortened(recipe)!r}{nearest(recipe, PRESETS)}",
            hint=f"give one of {', '.join(PRESETS)}, or a YAML file such as configs/Qwen3-8B.yaml",
        )
    try:
        with path.open(encoding="utf-8") as file:
            content = strict_yaml.parse(file.read(strict_yaml.LIMIT + 1))
    except (OSError, ValueError) as error:
        raise RotationZooError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(content, dict):
        raise RotationZooError(
            f"{path} is no recipe: it holds no keys", hint="see configs/ for examples"
        )
    return from_dict(content, str(path))


def from_dict(content: dict[str, Any], origin: str) -> Recipe:
    """Build a recipe from parsed YAML or JSON. Missing keys come from the preset that it `extends`,
    by default `oscar`. Raises `RotationZooError`, naming `origin`."""
    # YAML allows numbers as keys. As text, they get the usual error for unknown keys.
    content = {str(key): value for key, value in content.items()}
    base = str(content.pop("extends", "oscar"))
    if base not in PRESETS:
        raise RotationZooError(
            f"{origin} extends an unknown recipe {shortened(base)!r}{nearest(base, PRESETS)}"
        )
    preset = PRESETS[base].model_dump()
    # Sections are merged key by key, so that a file holds only what differs.
    for section, example in _SECTIONS.items():
        changes = content.get(section)
        if changes is None and section == "search":
            continue  # the preset's, or none where the file says so
        changes = changes or {}
        if not isinstance(changes, dict) or not all(isinstance(key, str) for key in changes):
            raise RotationZooError(f"{origin}: {section} must hold keys, such as {example}")
        content[section] = {**(preset[section] or {}), **changes}
    try:
        return Recipe(**{**preset, **content})
    except ValidationError as error:
        raise RotationZooError(
            f"{origin}: {_first_problem(error)}", hint="see docs/recipes.md for every key"
        ) from error


def override(recipe: Recipe, **data: Any) -> Recipe:
    """The recipe with the given `data` settings, such as command-line flags. Settings that are None
    change nothing.

    Where a recipe has no eigenbasis, `seed` also becomes its own seed. Raises `UsageError`.
    """
    # The recipe is built anew, because pydantic's `model_copy` does not validate.
    changes = {key: value for key, value in data.items() if value is not None}
    content = {**recipe.model_dump(), "data": {**recipe.data.model_dump(), **changes}}
    if "seed" in changes and not recipe.has_eigenbasis:
        content["seed"] = changes["seed"]
    try:
        return from_dict(content, "the options")
    except RotationZooError as error:
        raise UsageError(str(error), error.hint) from error


def equalized(recipe: Recipe) -> Recipe:
    """The recipe with equalizers, under a name that says so."""
    if recipe.equalize:
        return recipe
    return recipe.model_copy(update={"equalize": True, "name": f"{recipe.name}-equalized"})


def with_feedback(recipe: Recipe, feedback: bool) -> Recipe:
    """The recipe with error feedback or without it, under a name that says so."""
    if recipe.feedback == feedback:
        return recipe
    suffix = "feedback" if feedback else "nearest"
    return recipe.model_copy(update={"feedback": feedback, "name": f"{recipe.name}-{suffix}"})


def with_rope_scaling(recipe: Recipe, scaling: str) -> Recipe:
    """The recipe for a model whose RoPE is scaled, under a name that says so. Raises
    `UsageError`."""
    content = {**recipe.model_dump(), "rope_scaling": scaling}
    try:
        scaled = from_dict(content, "the options")
    except RotationZooError as error:
        raise UsageError(str(error), hint="--rope-scaling yarn:4") from error
    if scaled.rope_scaling == recipe.rope_scaling:
        return recipe
    suffix = str(scaled.rope_scaling).replace(":", "-")
    return scaled.model_copy(update={"name": f"{recipe.name}-{suffix}"})


def _first_problem(error: ValidationError) -> str:
    """The first problem that pydantic reports, in one line."""
    problem = error.errors()[0]
    key = shortened(str(problem["loc"][-1]))
    if problem["type"] == "extra_forbidden":
        sections: dict[int | str, type[Section]] = {"data": Data, "search": Search}
        section = sections.get(problem["loc"][0], Recipe)
        return f"unknown key {key!r}{nearest(key, section.model_fields)}"
    reason = problem["msg"].removeprefix("Value error, ").lower()
    return f"{key} = {shortened(repr(problem['input']))}: {reason}"
