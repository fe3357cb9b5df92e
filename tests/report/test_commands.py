"""The command that makes an artifact again gives its recipe."""

import shlex

import pytest
import yaml
from support.reports import Made, make_artifact

from rotationzoo.artifact.store import Artifact
from rotationzoo.recipe import PRESETS, override
from rotationzoo.report.commands import name_in_commands, reproduce_command


@pytest.fixture
def manifest(tmp_path):
    artifact = Artifact.open(make_artifact(tmp_path / "made", Made(layers=[0]), evaluated=False))
    return artifact.manifest


def of_recipe(manifest, recipe):
    return reproduce_command(manifest.model_copy(update={"recipe": recipe.published()}))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_named(manifest, name):
    command = of_recipe(manifest, PRESETS[name])
    assert command == f"rotationzoo calibrate demo --recipe {name}"


def test_other_text_is_given_in_flags(manifest):
    changes = {"source": "my text.jsonl", "tokens": 4096, "packing": "mixed", "seed": 3}
    recipe = override(PRESETS["oscar"], **changes)
    words = shlex.split(of_recipe(manifest, recipe))
    assert words[3:5] == ["--recipe", "oscar"]
    given = dict(zip(words[5::2], words[6::2], strict=True))
    expected = {"--tokens": "4096", "--packing": "mixed", "--seed": "3"}
    assert given == {"--data": "my text.jsonl", **expected}


def test_another_recipe_is_a_file_of_its_yaml(manifest):
    recipe = PRESETS["oscar"].model_copy(update={"key_clip": 0.5})
    assert of_recipe(manifest, recipe) == "rotationzoo calibrate demo --recipe recipe.yaml"
    assert yaml.safe_load(recipe.yaml())["key_clip"] == 0.5


def test_a_revision_is_named_and_imported_files_have_no_command(manifest):
    model = manifest.model.model_copy(update={"id": "some/model", "revision": "abc"})
    named = reproduce_command(manifest.model_copy(update={"model": model}))
    assert named == "rotationzoo calibrate some/model --revision abc --recipe hadamard"
    assert reproduce_command(manifest.model_copy(update={"imported": object()})) is None


@pytest.mark.hostile("markup")
def test_a_models_name_runs_nothing_in_a_shell(manifest):
    model = manifest.model.model_copy(update={"id": "a/b; touch taken", "revision": "abc"})
    assert name_in_commands(model) == "'a/b; touch taken'"
    command = reproduce_command(manifest.model_copy(update={"model": model}))
    assert shlex.split(command)[2] == model.id
