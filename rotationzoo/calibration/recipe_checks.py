"""Whether a recipe fits a model and a text, and how it is adapted where that is allowed.

This stands apart from `plan` because `verify` needs it, and does not wait for transformers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rotationzoo.codec.bit_allocation import check_room
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, cached_rows, check_group_size, head_dims
from rotationzoo.linalg import compositions, orthogonality
from rotationzoo.linalg.composition_table import GIVEN
from rotationzoo.model import centering
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.rope import check_positions, position_count
from rotationzoo.sides import HEADS
from rotationzoo.words import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_recipe(recipe: Recipe, geometry: Geometry) -> None:
    """Raise `RotationZooError` if the recipe's composition does not exist for a head dimension: for
    want of a Hadamard matrix, for groups that do not divide it, or because it is `given`."""
    if recipe.composition == GIVEN:
        problem = "the composition 'given' stands for imported matrices and cannot be calibrated"
        hint = "leave composition out of the recipe, or see docs/recipes.md for those that can"
        raise RotationZooError(problem, hint)
    cached = cached_rows(geometry)
    if not all(map(recipe.target_kinds, cached.sides)):
        raise RotationZooError(
            f"{cached.words} have no statistics {recipe.key_statistic} and "
            f"{recipe.value_statistic}, as the recipe {recipe.name} asks for",
            hint="give key_statistic: query and value_statistic: output, or key and value",
        )
    if cached is not HEADS and recipe.data.media:
        problem = f"images and audio are not counted for models that cache {cached.words} yet"
        hint = f"calibrate on text, without {' and '.join(recipe.data.media)}"
        raise RotationZooError(problem, hint)
    dims = head_dims(geometry)
    check_group_size(recipe.group_size, dims)
    check_room(recipe.budget, recipe.group_size, geometry)
    # Build the rotations only for the errors that it raises.
    for dim in sorted(dims):
        if recipe.has_eigenbasis:
            identity = orthogonality.identity(dim)
            compositions.compose(identity, recipe.composition, recipe.group(dim))
        else:
            compositions.data_free(dim, recipe.composition, seed=0)


def settle_centering(recipe: Recipe, layers: Sequence[int]) -> tuple[Recipe, list[str]]:
    """The recipe for a model whose attention a common shift of keys changes in `layers`: keys keep
    their mean. Also returns notes for the user."""
    if not recipe.center_keys or not layers:
        return recipe, []
    reason = centering.reason(layers)
    note = f"keys keep their mean, although the recipe {recipe.name} centers them: {reason}"
    return recipe.model_copy(update={"center_keys": False}), [note]


USUAL_LENGTH = 2048
"""Tokens of a row where there are fewer than the preset's rows would take."""


def shorten_rows(recipe: Recipe, config: "PretrainedConfig") -> Recipe:
    """The recipe, with rows cut to the number of positions that the model has, and longer ones than
    `USUAL_LENGTH` to all of its tokens."""
    data = recipe.data
    length = min(data.length, max(data.tokens, USUAL_LENGTH), position_count(config) or data.length)
    if length == data.length:
        return recipe
    data = data.model_copy(update={"length": length})
    return recipe.model_copy(update={"data": data})


def check_length(recipe: Recipe, config: "PretrainedConfig") -> None:
    """Raise `RotationZooError` if the recipe's rows are too long for the model, or too short to be
    useful."""
    if not recipe.needs_statistics:
        return
    length, data = recipe.data.length, recipe.data
    check_positions(config, length, "rows", "add: --length {}")
    if recipe.exclude_sink and length <= recipe.sink:
        problem = f"rows of {length} tokens leave nothing past the {recipe.sink} sink tokens"
        hint = "give longer rows with --length"
        raise RotationZooError(problem, hint)
    if not data.media and not data.rows:
        problem = f"{counted(data.tokens, 'token')} cannot fill one row of {length:,}"
        hint = f"ask for at least --tokens {length}, or for shorter rows with --length"
        raise RotationZooError(problem, hint)
