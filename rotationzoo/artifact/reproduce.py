"""The command that makes an artifact again."""

import shlex

from rotationzoo.artifact.manifest import Manifest, Model
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
    words = ["rotationzoo", "calibrate", name_in_commands(manifest.model)]
    if manifest.model.revision:
        words += ["--revision", manifest.model.revision]
    return shlex.join([*words, *_recipe_words(Recipe.model_validate(manifest.recipe))])


def name_in_commands(model: Model) -> str:
    """The model's name in commands for readers: a hub id or `demo`, else the placeholder `MODEL`,
    because a folder is on one machine alone."""
    published = model.config_sha256 is not None and model.revision is not None
    return model.id if published or model.id == "demo" else "MODEL"


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
