"""The name of a local model in commands."""

from pathlib import Path

import pytest
from support.command_line import edited_manifest, succeeded
from support.models import edit_config


@pytest.fixture
def made(inside, copied_tiny):
    """Rotations of a model that was given as `../model`."""
    words = "calibrate", "../model", "--recipe", "hadamard", "--output", "made"
    succeeded(inside(*words))
    return inside.folder / "made"


def named(inside, folder: Path) -> str:
    """The name of the model in the last line of `inspect`."""
    line = succeeded(inside("inspect", folder)).stderr.splitlines()[-1]
    return line.removeprefix("Next: rotationzoo evaluate ").split(" ")[0]


def test_a_model_is_named_as_it_was_given(inside, made, copied_tiny, monkeypatch):
    assert named(inside, made) == "../model"
    assert "evaluate ../model made" in inside("report", "made").stderr
    page = (made / "report.html").read_text()
    assert "<span>calibrate</span> <span>../model</span>" in page
    assert "/model" not in (made / "manifest.json").read_text(), "which is published"
    monkeypatch.chdir(inside.folder.parent)
    assert named(inside, made) == "model", "the working folder's"
    monkeypatch.chdir(copied_tiny)
    assert Path(named(inside, made)).resolve() == copied_tiny
    edit_config(copied_tiny, vocab_size=77)
    assert named(inside, made) == "MODEL", "it is another one by now"


def test_a_gguf_file_is_named_where_it_lies(inside, made):
    with edited_manifest(made) as manifest:
        manifest["model"] |= {"id": "model.gguf", "config_sha256": "0" * 64}
    assert named(inside, made) == "MODEL"
    (inside.folder / "model.gguf").write_bytes(b"GGUF")
    assert named(inside, made) == "model.gguf"
