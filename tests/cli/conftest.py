"""An artifact to look at, and a terminal to look at it on."""

import sys
from io import StringIO
from pathlib import Path

import pytest
from support.models import save_tiny

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.recipe import load


@pytest.fixture(scope="session")
def artifact(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    model = save_tiny(folder / "tiny")
    job = Job(model=str(model), recipe=load("hadamard"), output=folder / "out", device="cpu")
    return calibrate(job).folder


@pytest.fixture
def terminal(monkeypatch):
    """`terminal(width)` makes stdout a terminal, and gives what is written to it."""

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    def open_terminal(width: int) -> StringIO:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        return screen

    return open_terminal
