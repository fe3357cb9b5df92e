"""Recipes: every choice that decides which rotation comes out. The public names are here."""

from rotationzoo.recipe.loading import (
    PRESETS,
    from_dict,
    load,
    override,
    with_budget,
    with_feedback,
    with_rope_scaling,
)
from rotationzoo.recipe.schema import BUDGETS, FILES, Data, Recipe, digest, name_of, without_paths

__all__ = [
    "BUDGETS",
    "FILES",
    "PRESETS",
    "Data",
    "Recipe",
    "digest",
    "from_dict",
    "load",
    "name_of",
    "override",
    "with_budget",
    "with_feedback",
    "with_rope_scaling",
    "without_paths",
]
