"""Commands in odd places: inside an artifact, with names that are not UTF-8 or of no user, and with
streams that the caller has closed."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from support.cases import quick_first
from support.command_line import refused, succeeded
from support.models import DATA

LATIN = os.fsdecode(b"caf\xe9")
SMALL = ("--tokens", "512", "--length", "512", "--tasks", "none")


@pytest.fixture
def artifact(made, inside) -> Path:
    return Path(shutil.copytree(made, inside.folder / "mine"))


@pytest.mark.parametrize("place", quick_first([".", "absolute"]))
def test_a_report_inside_the_artifact_leaves_it_whole(artifact, inside, monkeypatch, place):
    monkeypatch.chdir(artifact)
    before = sorted(path.name for path in artifact.iterdir())
    place = "." if place == "." else str(artifact)
    done = succeeded(inside("report", place))
    assert f"Page: {Path('..', 'report.html')}" in done.stdout
    assert (artifact.parent / "report.html").is_file()
    assert sorted(path.name for path in artifact.iterdir()) == before
    succeeded(inside("verify", place))
    following = done.stderr.splitlines()[-1].removeprefix("Next: rotationzoo ")
    assert "--save" not in following
    succeeded(inside(*shlex.split(following), *SMALL))


@pytest.mark.hostile("path")
def test_an_artifact_whose_name_is_not_utf8_is_not_called_damaged(artifact, inside):
    artifact.rename(artifact.with_name(LATIN))
    for word in ("verify", "inspect", "report"):
        error = refused(inside(word, LATIN))
        assert "is not UTF-8" in error
        assert "damaged" not in error


@pytest.mark.hostile("path")
def test_no_artifact_is_made_of_names_that_are_not_utf8(inside):
    shutil.copytree(DATA / "model", inside.folder / LATIN)
    shutil.copy(DATA / "calibration.jsonl", inside.folder / f"{LATIN}.jsonl")
    make = ("calibrate", "demo", "--recipe", "hadamard")
    for words in (
        ("calibrate", LATIN, "--recipe", "hadamard", "--output", "out"),
        (*make, "--output", LATIN),
        ("calibrate", "demo", "--data", f"{LATIN}.jsonl", "--output", "out"),
    ):
        assert "is not UTF-8" in refused(inside(*words))
    assert not (inside.folder / "out").exists()


@pytest.mark.hostile("terminal")
@pytest.mark.parametrize("words", [("plan",), ("report",), ("serve", "demo", "--rotations")])
def test_a_home_of_nobody(inside, words):
    error = refused(inside(*words, "~nobodyx/y"))
    assert "RuntimeError" not in error
    assert "~nobodyx/y" in error or "a user without a home directory" in error


@pytest.mark.thorough
@pytest.mark.hostile("terminal")
@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)])
def test_streams_that_are_closed(command, closed):
    def close():
        for stream in closed:
            os.close(stream)

    done = command("plan", "demo", "--json", alone=True, preexec_fn=close)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert 1 in closed or json.loads(done.stdout)["commands"]
