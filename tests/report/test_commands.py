"""The command that makes an artifact again gives its recipe."""

import shlex

import pytest
from support.reports import make_artifact

from rotationzoo.artifact.store import Artifact
from rotationzoo.recipe import PRESETS, override
from rotationzoo.report.commands import name_in_commands, reproduce_command


@pytest.fixture
def manifest(tmp_path):
    return Artifact.open(make_artifact(tmp_path / "made")).manifest


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


def test_imported_files_have_no_command(manifest):
    assert reproduce_command(manifest.model_copy(update={"imported": object()})) is None


@pytest.mark.hostile("markup")
def test_a_models_name_runs_nothing_in_a_shell(manifest):
    model = manifest.model.model_copy(update={"id": "a/b; touch taken", "revision": "abc"})
    assert name_in_commands(model) == "'a/b; touch taken'"
    command = reproduce_command(manifest.model_copy(update={"model": model}))
    assert shlex.split(command)[2] == model.id
