"""Recipes of many tests."""

from rotationzoo.recipe import Data
from rotationzoo.recipe.loading import PRESETS

QUICK = PRESETS["oscar"]
"""A recipe without a budget of bits, which takes longer."""
CODED = PRESETS["transform"].model_copy(update={"data": Data(tokens=2048, length=512)})
"""The default, from little text."""
