"""The recipe of imported rotations, from what the files and the user state.

What neither states is taken from the published fitter's recipe, `oscar-v1`.
"""

from collections.abc import Mapping
from typing import Any

from rotationzoo.engines.objectives import Described
from rotationzoo.engines.rotation_file import Pair
from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.linalg.compositions import DATA_FREE
from rotationzoo.recipe import PRESETS, Recipe

_SERVED = ("key_clip", "value_clip", "sink", "recent")
_PUBLISHED = "oscar-v1"


def recipe_of_files(
    pair: Pair,
    described: Mapping[str, Described],
    composition: str,
    group_size: int | None,
    served: Mapping[str, float],
) -> tuple[Recipe, list[str]]:
    """The recipe, and remarks on what neither the files nor the user state.

    `described` maps each side to what its file states. `composition` is the recognised one.
    `served` holds the user's clip ratios and windows, which override those of the files. Raises
    `RotationZooError` if the files state something that no recipe allows.
    """
    defaults = PRESETS[_PUBLISHED]
    calibration = pair.key.calibration
    served_by_files = {
        name: calibration[name]
        for name in _SERVED
        if isinstance(calibration.get(name), int | float)
    }
    name = composition if composition in DATA_FREE else "imported"
    pooling = "head" if pair.per_head else "layer"
    stated: dict[str, Any] = {
        "name": name,
        "composition": composition,
        "pooling": pooling,
        "key_statistic": described["key"].statistic or defaults.key_statistic,
        "value_statistic": described["value"].statistic or defaults.value_statistic,
        "center_keys": bool(pair.key.content.mean),
        "group_size": group_size,
        **served_by_files,
        **served,
    }
    try:
        recipe = Recipe.model_validate({**defaults.model_dump(), **stated})
    except ValueError as error:
        raise RotationZooError(
            f"{pair.key.path.name} says what no recipe can: {first_sentence(error)}"
        ) from error
    notes = []
    if any(name not in stated for name in _SERVED):
        notes.append(
            "the files do not say clip ratios or windows; assumed are "
            f"{recipe.key_clip:g}/{recipe.value_clip:g} and {recipe.sink}/{recipe.recent}"
        )
    return _named(recipe, defaults), notes


def _named(recipe: Recipe, published: Recipe) -> Recipe:
    """The recipe, under the published recipe's name if it makes its matrices in the same way.

    How the matrices are served (group size, clip ratios, windows) does not matter for the name.
    """
    served = {"name", "group_size", *_SERVED}
    if recipe.model_dump(exclude=served) != published.model_dump(exclude=served):
        return recipe
    return recipe.model_copy(update={"name": _PUBLISHED})
