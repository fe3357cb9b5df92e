"""The presets: recipes that have a name. To add one, add a row to the table."""

from rotationzoo.recipe.schema import Data, Recipe
from rotationzoo.recipe.search import Search

# Rows of two lengths, because a search on rows of one length does worse on rows of others.
_LONG_MIXED = Data(tokens=262144, length=4096, packing="mixed")
_CLIP = Search(heads=False)
_PUBLISHED = Recipe(
    name="oscar-v1", value_statistic="key_energy", pooling="layer", exclude_sink=False
)
_SEARCHED = Recipe(key_clip=0.9, search=Search(composition=("hadamard",)), data=_LONG_MIXED)

_RECIPES = (
    Recipe(name="oscar"),
    Recipe(name="feedback", center_keys=True, feedback=True),
    Recipe(name="oscar-clip", search=_CLIP, data=_LONG_MIXED),
    _PUBLISHED,
    _PUBLISHED.model_copy(update={"name": "oscar-v1-clip", "search": _CLIP, "data": _LONG_MIXED}),
    _SEARCHED.model_copy(
        update={
            "name": "best",
            "center_keys": True,
            "feedback": True,
            "search": Search(composition=("hadamard",), center_keys=(False,), equalize=(True,)),
        }
    ),
    _SEARCHED.model_copy(update={"name": "best-uncentered"}),
    Recipe(name="hadamard", composition="hadamard"),
    Recipe(name="hadamard-clip", composition="hadamard", search=_CLIP, data=_LONG_MIXED),
    Recipe(name="identity", composition="identity"),
    Recipe(name="random", composition="random"),
)
PRESETS = {recipe.name: recipe for recipe in _RECIPES}
"""Name -> recipe, as `--recipe` and `extends` take it."""
