"""Recipes: every choice that decides which rotation comes out."""

from rotationzoo.recipe.schema import FILES, Data, Recipe, digest, name_of

__all__ = ["FILES", "Data", "Recipe", "digest", "name_of"]
