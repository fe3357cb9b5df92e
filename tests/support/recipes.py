"""Recipes of many tests."""

from rotationzoo.recipe.loading import PRESETS

QUICK = PRESETS["oscar"]
"""A recipe without a budget of bits, which takes longer."""
