"""Builders run what strangers published: only a whole artifact of their own row is signed."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.command_line import edited_manifest
from take_built import main, take_built

from rotationzoo.errors import RotationZooError

ROW = {"model": "demo", "revision": None, "name": "demo"}
OTHER = {"model": "Qwen/Qwen3-8B", "revision": "f" * 40, "name": "Qwen__Qwen3-8B"}


@pytest.fixture
def built(made, tmp_path) -> Path:
    """The folder of downloads, with that of one row in it."""
    shutil.copytree(made, tmp_path / "built" / "rotations-demo")
    return tmp_path / "built"


def say_model(folder: Path, **changes) -> None:
    """Have a manifest say something else of its model."""
    with edited_manifest(folder) as manifest:
        manifest["model"] |= changes


def test_the_folder_of_a_row_is_taken(built, tmp_path, monkeypatch, capsys):
    """Also if another row's build failed, which then has none."""
    words = [json.dumps({"include": [ROW, OTHER]}), built, tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["take_built.py", *map(str, words)])
    main()
    assert capsys.readouterr().out == "Took demo\n"
    assert (tmp_path / "out" / "demo" / "rotations.safetensors").is_file()


def write_into_another_row(built: Path) -> Path:
    return shutil.copytree(built / "rotations-demo", built / f"rotations-{OTHER['name']}")


def write_it_with_its_name(built: Path) -> None:
    say_model(write_into_another_row(built), id=OTHER["model"], revision="0" * 40)


FAULTS = {
    "one file more": (
        lambda built: (built / "rotations-demo" / "evil.py").write_text("import os\n"),
        "evil.py is not in the manifest",
    ),
    "a folder of no row": (
        lambda built: shutil.copytree(built / "rotations-demo", built / "rotations-evil"),
        "is of no model that was due",
    ),
    "the folder of another row": (write_into_another_row, "and not for ffff"),
    "that with its model": (write_it_with_its_name, "made for revision 0000"),
    "another revision": (
        lambda built: say_model(built / "rotations-demo", revision="f" * 40),
        "made for revision ffff",
    ),
    "another config": (
        lambda built: say_model(built / "rotations-demo", config_sha256="0" * 64),
        "made for another model or config",
    ),
    "changed rotations": (
        lambda built: (built / "rotations-demo" / "rotations.safetensors").write_bytes(b"x"),
        "is not the file that was written",
    ),
    "no artifact": (
        lambda built: (built / "rotations-demo" / "manifest.json").unlink(),
        "rotations-demo",
    ),
    "nothing": (lambda built: shutil.rmtree(built / "rotations-demo"), "nothing was built"),
}


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("fault", FAULTS)
def test_anything_else_stops_all(built, tmp_path, fault):
    spoil, problem = FAULTS[fault]
    spoil(built)
    with pytest.raises(RotationZooError, match=problem):
        take_built([ROW, OTHER], built, tmp_path / "out")
    assert not (tmp_path / "out").exists()
