"""The command that makes an artifact again."""

import shlex

from rotationzoo.artifact.manifest import Manifest
from rotationzoo.recipe import PRESETS, Recipe, override

RECIPE_FILE = "recipe.yaml"
_FLAGS = {
    "source": "--data",
    "prompts": "--prompts",
    "subset": "--subset",
    "split": "--split",
    "column": "--column",
    "packing": "--packing",
    "tokens": "--tokens",
    "length": "--length",
    "seed": "--seed",
}


def reproduce_command(manifest: Manifest) -> str | None:
    """The `calibrate` command of an artifact; None for imported files.

    A recipe that is no preset, nor one with other text, is named by the file `RECIPE_FILE`, which
    is to hold the YAML of the recipe.
    """
    if manifest.imported is not None:
        return None
    words = ["rotationzoo", "calibrate", manifest.model.id]
    if manifest.model.revision:
        words += ["--revision", manifest.model.revision]
    return shlex.join([*words, *_recipe_words(Recipe.model_validate(manifest.recipe))])


def _recipe_words(recipe: Recipe) -> list[str]:
    preset = PRESETS.get(recipe.name)
    if preset is None:
        return ["--recipe", RECIPE_FILE]
    words, changes = ["--recipe", recipe.name], {}
    for key, flag in _FLAGS.items():
        value = getattr(recipe.data, key)
        if value is not None and value != getattr(preset.data, key):
            words += [flag, str(value)]
            changes[key] = value
    same = override(preset, **changes).hash == recipe.hash
    return words if same else ["--recipe", RECIPE_FILE]
