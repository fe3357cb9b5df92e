"""A search that finds something."""

import pytest
from support.searches import search_recipe, task_for, wide_channel_model

from rotationzoo.calibration.search.task import SearchTask


@pytest.fixture(scope="session")
def task() -> SearchTask:
    """The search of a model with channels of keys that are far wider than the rest."""
    return task_for(wide_channel_model(), search_recipe(steps=3))
