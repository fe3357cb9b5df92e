"""The options of a cache, as Python callers and `generate` give them, and the settings that they
make."""

from pathlib import Path
from typing import Any, get_args

from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.pooling import reduced_rotations
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.codec import settings as caches
from rotationzoo.codec.engine_needs import DEFAULT, ENGINE_NAMES, check_sides, find_engine
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.codec.settings import CacheOptions, CacheSettings
from rotationzoo.errors import UsageError
from rotationzoo.geometry import check_group_size, shares_blocks
from rotationzoo.model.compatibility import check_fits
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import Rotations
from rotationzoo.words import nearest

Given = str | Path | Artifact | Rotations | None


def build_settings(
    rotations: Given | CacheSettings, model: PreTrainedModel, options: CacheOptions
) -> CacheSettings:
    """How a cache of this model stores its tokens. Arguments and errors are those of
    `RotatedCache`."""
    if isinstance(rotations, CacheSettings):
        if options:
            raise UsageError("settings of a cache take no options", hint="leave out the options")
        return rotations
    check_options({**options})
    recipe, engine = Recipe(), options.get("engine", DEFAULT)
    if isinstance(rotations, Artifact):
        recipe = rotations.recipe
        check_fits(rotations, model)
        budget = served_budget(options, rotations, model.config)
        check_sides(engine, rotations.rotations.sides)
        entry = find_engine(engine)
        rotations = reduced_rotations(rotations, not entry.heads, entry.uncentered, budget)
    elif rotations is None:
        rotations = fit(None, PRESETS["identity"], geometry_of(model))
    elif not isinstance(rotations, Rotations):
        hint = "give an artifact or its folder, or None"
        raise UsageError(f"an object of type {type(rotations).__name__} holds no rotations", hint)
    elif options.get("bits") is not None:
        raise UsageError("bits is for an artifact, whose recipe it changes", hint="leave it out")
    options = caches.as_engine(options, rotations.has_budget)
    settings = caches.complete_settings(recipe, rotations, options)
    dims = {rotation.dim for _, _, rotation in rotations.each()}
    check_group_size(settings.layout.group_size, dims)
    return settings


def served_budget(
    options: CacheOptions, artifact: Artifact, config: PretrainedConfig
) -> Budget | None:
    """The budget of an artifact in a cache with these options, as `budget_beside_others` has it
    where the engine keeps layers with a sliding window exact."""
    bits = options.get("bits")
    budget = None if bits is None else Budget(bits)
    if find_engine(options.get("engine", DEFAULT)).sliding:
        return budget
    return caches.budget_beside_others(budget, artifact.recipe.budget, shares_blocks(config))


def check_options(options: dict[str, Any]) -> None:
    """Raise `UsageError` for options that no cache can have."""
    choices = {"format": tuple(SIMULATED), "rounding": get_args(caches.Rounding)}
    choices |= {"prefill_layout": get_args(caches.Layout), "reading": get_args(caches.Reading)}
    choices["engine"] = ENGINE_NAMES
    for name, words in choices.items():
        if name in options and options[name] not in words:
            problem = f"there is no {name} {options[name]!r}{nearest(str(options[name]), words)}"
            hint = f"give one of {', '.join(words)}"
            raise UsageError(problem, hint)
    smallest = {"sink": 0, "recent": 0, "slack": 0}
    if options.get("group_size") is not None:
        smallest["group_size"] = 1
    for name, least in smallest.items():
        number = options.get(name, least)
        if not isinstance(number, int) or number < least:
            problem = f"{name} must be a whole number of at least {least}, not {number!r}"
            hint = f"{name}=64"
            raise UsageError(problem, hint)
