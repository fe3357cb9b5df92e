"""An artifact to look at, and a terminal to look at it on."""

import signal
import sys
from io import StringIO
from pathlib import Path

import pytest


@pytest.fixture
def artifact(calibrated) -> Path:
    return calibrated.folder


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


@pytest.fixture
def interruptible():
    """A suite that runs in the background of a shell ignores Ctrl-C; the test that takes this does
    not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
