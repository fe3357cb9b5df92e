"""The names that options choose from are those that the packages know."""

import typing

from rotationzoo.cli import options
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.engines.registry import ENGINES, EngineName, PullEngineName
from rotationzoo.recipe import PRESETS
from rotationzoo.zoo.hubs.registry import HUBS, HubName


def test_every_engine_hub_and_format_can_be_chosen():
    needs_nothing_else = {name for name, entry in ENGINES.items() if not entry.needs_base}
    assert set(typing.get_args(EngineName)) == set(ENGINES)
    assert set(typing.get_args(PullEngineName)) == needs_nothing_else
    assert set(typing.get_args(HubName)) == set(HUBS)
    assert set(typing.get_args(options.HubOrBoth)) == {*HUBS, "both"}
    assert set(typing.get_args(options.HubOrAny)) == {*HUBS, "any"}
    assert set(typing.get_args(options.Format)) == set(SIMULATED)


def test_help_names_every_recipe(inside):
    shown = inside("calibrate", "--help").stdout
    assert not [name for name in PRESETS if name not in shown]
