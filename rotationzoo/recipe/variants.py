"""The variants of a recipe: those among which its search chooses.

To let a search choose another key of the recipe, add a key of the same name to `Search` and a row
to `_CHOSEN`.
"""

import itertools
from typing import Any

from rotationzoo.recipe.schema import Recipe

# Key of `Recipe` and of `Search` -> how a value of it is named, if not by itself.
_CHOSEN: dict[str, dict[bool, str]] = {
    "composition": {},
    "center_keys": {True: "keys centred", False: ""},
    "equalize": {True: "equalized", False: ""},
}
_REFUSED_BY_SOME = ("center_keys", "equalize")
"""Keys that not every model allows."""


def variants(recipe: Recipe) -> dict[str, Recipe]:
    """Name -> recipe, for every combination of the values that the search is to try; the recipe
    itself comes first, and is the only one of a recipe without a search.

    A name says what a variant does, such as `hadamard, keys centred`.
    """
    values = {key: _values(recipe, key) for key in _CHOSEN}
    table = {}
    for combination in itertools.product(*values.values()):
        changes = dict(zip(values, combination, strict=True))
        table[_name(changes)] = recipe.model_copy(update=changes)
    return table


def tries(recipe: Recipe, key: str) -> bool:
    """Whether `center_keys` or `equalize` is true in any variant of a recipe."""
    return any(_values(recipe, key))


def without(recipe: Recipe, key: str) -> Recipe:
    """The recipe for a model that does not allow `center_keys` or `equalize`: no variant has it."""
    search = recipe.search and recipe.search.model_copy(update={key: ()})
    return recipe.model_copy(update={key: False, "search": search})


def followed_recipes(recipe: Recipe) -> list[Recipe]:
    """Every recipe that the artifact of this one may follow, on whatever model."""
    allowed = [recipe]
    if recipe.search is not None:
        for key in _REFUSED_BY_SOME:
            allowed += [without(one, key) for one in allowed]
    return [variant for one in allowed for variant in variants(one).values()]


def _values(recipe: Recipe, key: str) -> list[Any]:
    """The recipe's own value of a key, then the others to try."""
    others = getattr(recipe.search, key) if recipe.search else ()
    return list(dict.fromkeys([getattr(recipe, key), *others]))


def _name(changes: dict[str, Any]) -> str:
    words = [_CHOSEN[key].get(value, str(value)) for key, value in changes.items()]
    return ", ".join(word for word in words if word)
