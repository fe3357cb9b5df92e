"""Loading a recipe: from its name, from a YAML file, or with the command line's flags applied."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rotationzoo.budget import EQUAL, Budget
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.recipe.schema import Data, Recipe, Section
from rotationzoo.storage import strict_json
from rotationzoo.words import nearest, shortened

# Rows are long because the mean of keys changes with positions (RoPE).
_OSCAR = Recipe(name="oscar", center_keys=True, data=Data(length=8192))
_CODED = {"transform": True, "center_values": True}
_RECIPES = (
    _OSCAR.model_copy(update=dict(_CODED, name="transform", bits=2.5)),
    _OSCAR.model_copy(update=dict(_CODED, name="attention", metric="attention", bits=3.0)),
    _OSCAR,
    Recipe(name="oscar-v1", value_statistic="key_energy", pooling="layer", exclude_sink=False),
    Recipe(name="hadamard", composition="hadamard"),
    Recipe(name="random", composition="random"),
    Recipe(name="identity", composition="identity"),
)
PRESETS = {recipe.name: recipe for recipe in _RECIPES}
"""Name -> recipe, as `--recipe` and `extends` take it."""


def load(recipe: str) -> Recipe:
    """Load a preset by name, or a YAML file, which may extend another preset than `transform` with
    `extends: oscar`. Raises `RotationZooError` with the file, the key and the problem."""
    if recipe in PRESETS:
        return PRESETS[recipe]
    path = Path(recipe)
    if not os.path.isfile(path):  # not `Path.is_file`, which raises for a name of many characters
        meant = nearest(recipe, PRESETS)
        hint = f"give one of {', '.join(PRESETS)}, or a YAML file such as configs/Qwen3-8B.yaml"
        raise RotationZooError(f"there is no recipe or file {shortened(recipe)!r}{meant}", hint)
    try:
        with path.open(encoding="utf-8") as file:
            content = strict_json.parse_yaml(file.read(strict_json.YAML_LIMIT + 1))
    except (OSError, ValueError) as error:
        raise RotationZooError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(content, dict):
        hint = "see configs/ for examples"
        raise RotationZooError(f"{path} is not a recipe: it holds no keys", hint)
    return from_dict(content, str(path), "transform")


def from_dict(content: dict[str, Any], origin: str, extends: str = "oscar") -> Recipe:
    """Build a recipe on top of the preset in `extends`. Raises `RotationZooError` with `origin`."""
    # YAML allows numbers as keys. As text, they get the usual error for unknown keys.
    content = {str(key): value for key, value in content.items()}
    base = str(content.pop("extends", extends))
    if base not in PRESETS:
        unknown = f"an unknown recipe {shortened(base)!r}{nearest(base, PRESETS)}"
        raise RotationZooError(f"{origin} extends {unknown}")
    preset = PRESETS[base].model_dump()
    changes = content.get("data") or {}
    if not isinstance(changes, dict) or not all(isinstance(key, str) for key in changes):
        raise RotationZooError(f"{origin}: data must hold keys, such as source and tokens")
    if asdict(EQUAL).keys() & content:  # one key of the budget replaces the preset's whole budget
        preset |= asdict(EQUAL)
    content["data"] = {**preset["data"], **changes}
    try:
        return Recipe(**{**preset, **content})
    except ValidationError as error:
        hint = "see docs/recipes.md for every key"
        raise RotationZooError(f"{origin}: {_first_problem(error)}", hint) from error


def override(recipe: Recipe, **data: Any) -> Recipe:
    """The recipe with these `data` settings; None changes nothing. Raises `UsageError`."""
    # pydantic's `model_copy` would not validate.
    changes = {key: value for key, value in data.items() if value is not None}
    content = {**recipe.model_dump(), "data": {**recipe.data.model_dump(), **changes}}
    if "seed" in changes and not recipe.has_eigenbasis:
        content["seed"] = changes["seed"]
    return _from_options(content)


def _from_options(content: dict[str, Any], hint: str | None = None) -> Recipe:
    """Build a recipe that options have changed. Raises `UsageError`."""
    try:
        return from_dict(content, "the options")
    except RotationZooError as error:
        raise UsageError(str(error), hint or error.hint) from error


def with_budget(recipe: Recipe, budget: Budget) -> Recipe:
    """The recipe, renamed, with another budget of bits. Raises `UsageError`."""
    content = {**recipe.model_dump(), **asdict(budget)}
    changed = _from_options(content, "as: --bits 2.5, with a recipe such as transform")
    name = recipe.name.removesuffix(_name_budget(recipe.budget)) + _name_budget(budget)
    return changed.model_copy(update={"name": name})


def _name_budget(budget: Budget) -> str:
    return "".join(f"-{number:g}" for number in filter(None, asdict(budget).values())) + "-bits"


def with_rope_scaling(recipe: Recipe, scaling: str | None) -> Recipe:
    """The recipe, renamed, for a model with scaled RoPE, if any. Raises `UsageError`."""
    content = {**recipe.model_dump(), "rope_scaling": scaling}
    scaled = _from_options(content, "--rope-scaling yarn:4")
    if scaled.rope_scaling == recipe.rope_scaling:
        return recipe
    suffix = str(scaled.rope_scaling).replace(":", "-")
    return scaled.model_copy(update={"name": f"{recipe.name}-{suffix}"})


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    reason = problem["msg"].removeprefix("Value error, ").lower()
    if not problem["loc"]:  # keys that exclude each other
        return reason
    key = shortened(str(problem["loc"][-1]))
    if problem["type"] == "extra_forbidden":
        section: type[Section] = Data if problem["loc"][0] == "data" else Recipe
        return f"unknown key {key!r}{nearest(key, section.model_fields)}"
    return f"{key} = {shortened(repr(problem['input']))}: {reason}"
