"""The frame of all commands: what they import, exit codes, and errors that nobody foresaw."""

import json
import os
import signal

import pytest
from support.cases import quick_first
from support.command_line import only_error, run_apart

from rotationzoo.cli.output import visible


def test_commands_that_read_an_artifact_do_not_wait_for_transformers(made, tmp_path):
    """It takes half of their time to import, and only models need it."""
    program = f"""
from rotationzoo.cli.app import main
for words in (
    "inspect {made}", "verify {made}", "export {made} --to sglang --output out",
    "push {made} me/zoo --dry-run", "list --index bundled",
):
    try:
        main(words.split())
    except SystemExit as done:
        assert not done.code, words
"""
    _, imported = run_apart(program, cwd=tmp_path)
    assert not imported & {"transformers", "accelerate", "datasets", "scipy"}


FULL = "No space left on device\nHint: make room"


WRITERS = {"list --index bundled": FULL, "--version": FULL, "inspect x --json": "x is not an"}


@pytest.mark.parametrize(("words", "says"), quick_first(WRITERS.items()))
def test_a_full_standard_output_is_one_sentence(command, words, says):
    with open("/dev/full", "w") as full:
        done = command(*words.split(), stdout=full, alone=True)
    assert done.returncode == 1
    assert f"Error: {says}" in done.stderr
    assert done.stderr.count("No space") == (says == FULL)
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr


def test_a_reader_that_has_read_enough_is_no_error(command):
    """As `rotationzoo list | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = command("list", "--index", "bundled", stdout=writing)
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == "Read the index that came with rotationzoo\n"


@pytest.mark.parametrize("words", ["inspect x", "evaluate demo x", "verify x --model demo"])
def test_ctrl_c_is_one_sentence_in_every_command(inside, monkeypatch, interruptible, words):
    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("rotationzoo.artifact.store.Artifact.open", interrupt)
    says = only_error(inside(*words.split()), 130)
    assert says == f"Error: interrupted\nHint: run it again with: rotationzoo {words}\n"


@pytest.mark.hostile("terminal")
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (KeyError("weight"), "KeyError: 'weight'"),
        (MemoryError(), "MemoryError"),
        (ValueError("\n\n \x1b[2J"), r"ValueError: \x1b[2J"),
        (ValueError("x" * 100_000), "ValueError: xxx"),
        (OSError("no number"), "OSError: no number"),
    ],
)
def test_an_unforeseen_error_is_its_type_and_first_line(inside, monkeypatch, error, says):
    def fail(*_):
        raise error

    monkeypatch.setattr("rotationzoo.artifact.store.Artifact.open", fail)
    result = inside("inspect", "x")
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(f"Error: {says}")
    assert len(first) < 1100
    assert "ROTATIONZOO_DEBUG=1" in second
    as_json = json.loads(inside("inspect", "x", "--json").stdout)
    assert visible(as_json["error"]).startswith(says)
    monkeypatch.setenv("ROTATIONZOO_DEBUG", "1")
    asked_for = inside("inspect", "x").stderr
    assert "Traceback" in asked_for
    assert "\x1b" not in asked_for


def test_one_of_several_processes_is_refused(inside, monkeypatch):
    """torchrun would have each of them do the whole command, into the same folder."""
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "start it without torchrun, and use --device-map" in only_error(inside("list"), 2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert inside("plan", "demo").returncode == 0
