"""The presets: recipes that have a name. To add one, add a row to the table."""

from rotationzoo.recipe.schema import Recipe

_RECIPES = (
    Recipe(name="oscar", center_keys=True, feedback=True),
    Recipe(name="oscar-v1", value_statistic="key_energy", pooling="layer", exclude_sink=False),
    Recipe(name="hadamard", composition="hadamard"),
    Recipe(name="random", composition="random"),
    Recipe(name="identity", composition="identity"),
)
PRESETS = {recipe.name: recipe for recipe in _RECIPES}
"""Name -> recipe, as `--recipe` and `extends` take it."""
