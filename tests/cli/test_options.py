"""The names that options choose from are those that the packages know."""

from rotationzoo.cli import options
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.engines.export import ENGINES
from rotationzoo.recipe import PRESETS
from rotationzoo.zoo.index import HUBS


def test_every_engine_hub_and_format_can_be_chosen():
    assert set(ENGINES) == set(options.ENGINES)
    assert set(options.PULL_ENGINES) == set(ENGINES) - {"llama.cpp"}
    assert set(HUBS) == set(options.HUBS)
    assert set(SIMULATED) == set(options.FORMATS)


def test_help_names_every_recipe(inside):
    shown = inside("calibrate", "--help").stdout
    assert not [name for name in PRESETS if name not in shown]
