"""Recipes of many tests."""

from rotationzoo.recipe.loading import PRESETS, without_budget

QUICK = without_budget(PRESETS["oscar"])
"""The default without its budget of bits, which takes longer."""
