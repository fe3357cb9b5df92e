"""Folders of strangers: pipes, devices and folders where files should be."""

import json
import os
import socket
from pathlib import Path

import pytest
from support.command_line import READERS, put_file, refused, succeeded
from support.models import save_tiny


def special(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is at most 107 bytes long
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
        os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)


KINDS = [
    pytest.param(kind, marks=pytest.mark.hostile("link"))
    for kind in ("pipe", "socket", "folder", "device", "loop")
]
COMMANDS = *READERS, ("report",), ("validate", "--device", "cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["manifest.json", "rotations.safetensors", "statistics.safetensors"]
)
def test_nothing_waits_for_a_pipe_or_reads_a_device(inside, folder, name, kind):
    special(folder / name, kind)
    for word, *more in COMMANDS:
        reads = dict.fromkeys(["inspect", "report"], "rotations.safetensors")
        if name not in ("manifest.json", reads.get(word, name)):
            continue
        assert refused(inside(word, folder, *more))


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_of_an_evaluation_that_is_no_file(inside, folder, kind):
    put_file(folder, "evaluation.json", b"{}")
    special(folder / "evaluation.json", kind)
    assert "evaluation.json" in refused(inside("report", folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_and_an_index_that_are_no_files(inside, kind):
    (inside.folder / "rotations").mkdir()
    special(inside.folder / "rotations" / "demo-hadamard.checkpoint.safetensors", kind)
    assert "checkpoint" in refused(inside("calibrate", "demo", "--recipe", "hadamard"))
    special(inside.folder / "zoo_index.json", kind)
    named = "/dev/zero" if kind == "device" else "zoo_index.json"
    assert named in refused(inside("list", "--index", "zoo_index.json"))


# ---- folders of models


@pytest.fixture
def model(tmp_path) -> Path:
    return save_tiny(tmp_path / "model")


@pytest.mark.hostile("link")
@pytest.mark.parametrize("name", ["README.md", "generation_config.json"])
def test_a_pipe_in_a_models_folder_is_not_waited_for(inside, model, name):
    special(model / name, "pipe")
    succeeded(inside("calibrate", model, "--recipe", "hadamard"))


@pytest.mark.hostile("path")
@pytest.mark.parametrize(
    "shards",
    [
        {"a": "../secret.safetensors"},
        {"a": "/etc/hostname"},
        {"a": {"b": 1}},
        {"a": None},
        [],
        "x",
        3,
    ],
)
def test_an_index_of_shards_names_files_of_its_folder(inside, model, shards):
    (model.parent / "secret.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    refused(inside("calibrate", model, "--tokens", "1024", "--length", "256"))
    assert not (inside.folder / "rotations").exists()
