import pytest
import yaml
from support.places import ROOT

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS, load, override

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_are_the_documented_ones():
    oscar = load("oscar")
    assert (oscar.key_clip, oscar.value_clip, oscar.sink, oscar.recent) == (0.96, 0.92, 64, 256)
    assert (oscar.pooling, oscar.composition) == ("head", "r_h_pbr")
    assert (oscar.key_statistic, oscar.value_statistic) == ("query", "output")
    assert oscar.group(128) == 128
    assert (oscar.center_keys, bool(oscar.budget)) == (True, False)
    published = load("oscar-v1")
    assert (published.pooling, published.value_statistic) == ("layer", "key_energy")
    switches = published.exclude_sink, published.center_keys, published.transform
    assert not any(switches)


@pytest.mark.parametrize("name", PRESETS)
def test_yaml_round_trip_keeps_the_hash(name, tmp_path):
    recipe = PRESETS[name]
    path = write(tmp_path, yaml.safe_dump({**recipe.model_dump(), "transform": recipe.transform}))
    assert load(path) == recipe
    assert load(path).hash == recipe.hash


def test_every_setting_changes_the_hash():
    assert len({recipe.hash for recipe in PRESETS.values()}) == len(PRESETS)
    assert override(Recipe(), tokens=4096).hash != Recipe().hash


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("key_clipp: 0.9", "unknown key 'key_clipp' (did you mean 'key_clip'?)"),
        ("data: {token: 5}", "unknown key 'token' (did you mean 'tokens'?)"),
        ("key_clip: 0", "key_clip = 0"),
        ("composition: r_h_bpr", "did you mean 'r_h_pbr'?"),
        ("extends: oskar", "did you mean 'oscar'?"),
        ("pooling: heads", "pooling = 'heads'"),
        ("- a list", "is not a recipe"),
        ("a: [", "not readable YAML"),
        ("data: 7", "data must hold keys"),
    ],
)
def test_mistakes_in_recipes_are_named(text, words, tmp_path):
    with pytest.raises(RotationZooError) as caught:
        load(write(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_released_configurations_load(path):
    recipe = load(str(path))
    assert recipe.model
    assert path.stem == recipe.model.split("/")[-1]
    assert len(yaml.safe_load(path.read_text())) < 12, "say only what differs from the preset"
