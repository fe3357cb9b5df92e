"""A small artifact to do things to."""

import shutil
from pathlib import Path

import pytest
from support.command_line import small_artifact


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """The artifact `out` beside its model `tiny`, which no test may change."""
    return small_artifact(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(small, tmp_path) -> Path:
    """A copy, to damage."""
    return Path(shutil.copytree(small, tmp_path / "out"))
