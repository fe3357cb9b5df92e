"""A small artifact to do things to."""

import shutil
from pathlib import Path

import pytest
from support.command_line import SMALL_RECIPE
from support.models import save_tiny

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """The artifact `out` beside its model `tiny`, which no test may change."""
    place = tmp_path_factory.mktemp("made")
    model = save_tiny(place / "tiny")
    return calibrate(Job(str(model), SMALL_RECIPE, place / "out", device="cpu")).folder


@pytest.fixture
def folder(small, tmp_path) -> Path:
    """A copy, to damage."""
    return Path(shutil.copytree(small, tmp_path / "out"))
