"""What all tests are run with: an environment of their own, and the fixtures of `support.fixtures`.

The process that hands tests out to others (`pytest -n 2`) loads this file too, and no fixtures:
with torch, they take it nine seconds, for which all others wait.
"""

import functools
import gc
import os
import tempfile

import pytest

# A search for cycles walks through every object of torch and transformers. The usual ones take a
# sixth of the time of all tests.
gc.set_threshold(20_000, 20, 20)
# Threads that wait for each other do not keep a processor busy, which other tests need. It is read
# when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Nothing in this process may look for a hub; subprocesses get one of their own.
os.environ["HF_HUB_OFFLINE"] = "1"
# Nor may a test see what the user has made, or remember anything for the user.
_STATE = tempfile.TemporaryDirectory(prefix="rotationzoo-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs",
        action="store_true",
        help="write tables that tests compute into docs/, instead of comparing them",
    )
    parser.addoption(
        "--seed-offset",
        type=int,
        default=0,
        help="add this to every seed of torch that a test draws with, to try other numbers",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not config.option.collectonly:
        return
    import typer.main
    from support import fixtures

    # Typer makes commands of their functions once, and not for every run inside this process.
    typer.main.get_command = functools.cache(typer.main.get_command)
    # Before tests are collected: some draw when they are imported.
    if offset := config.getoption("--seed-offset"):
        fixtures.move_seeds(offset)
    config.pluginmanager.register(fixtures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """What is imported by now stays, and no search for cycles looks at it again."""
    gc.collect()
    gc.freeze()
