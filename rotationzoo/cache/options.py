"""The settings that options make of a cache for one model."""

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.reductions import reduced_rotations
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.codec import settings as caches
from rotationzoo.codec.engine_needs import DEFAULT, check_sides, find_engine
from rotationzoo.codec.options import CacheOptions
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import UsageError
from rotationzoo.geometry import check_group_size, shares_blocks
from rotationzoo.model.compatibility import check_fits
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import Rotations

Given = str | Path | Artifact | Rotations | None


def build_settings(
    rotations: Given | CacheSettings, model: PreTrainedModel, options: CacheOptions
) -> CacheSettings:
    """How a cache of this model stores its tokens. Arguments and errors are those of
    `RotatedCache`."""
    if isinstance(rotations, CacheSettings):
        if options != CacheOptions():
            raise UsageError("settings of a cache take no options", hint="leave out the options")
        return rotations
    recipe, engine = Recipe(), options.engine or DEFAULT
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
    elif options.bits is not None:
        raise UsageError("bits is for an artifact, whose recipe it changes", hint="leave it out")
    settings = caches.complete_settings(recipe, rotations, options)
    dims = {rotation.dim for _, _, rotation in rotations.each()}
    check_group_size(settings.layout.group_size, dims)
    return settings


def served_budget(
    options: CacheOptions, artifact: Artifact, config: PretrainedConfig
) -> Budget | None:
    """The budget of an artifact in a cache with these options, as `budget_beside_others` has it
    where the engine keeps layers with a sliding window exact."""
    budget = None if options.bits is None else Budget(options.bits)
    if find_engine(options.engine or DEFAULT).sliding:
        return budget
    return caches.budget_beside_others(budget, artifact.recipe.budget, shares_blocks(config))
