"""Recipes of many tests."""

from rotationzoo.recipe.loading import PRESETS

QUICK = PRESETS["oscar"]
"""A recipe without transform coding, which takes longer."""
CODED = PRESETS["attention"]
"""The quickest recipe with transform coding."""
