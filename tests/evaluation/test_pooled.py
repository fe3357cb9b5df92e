"""One rotation per layer beside an artifact's own: what it costs, and that an export says so."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from support.command_line import edited_manifest, only_error
from support.models import save_tiny
from support.reports import evaluate

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.evaluation.arms import BASELINES, build_arms
from rotationzoo.evaluation.job import Evaluation
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.recipe import PRESETS, Data

TEXT = Data(tokens=1024, length=256)
SMALL = ["--tokens", "1024", "--length", "256", "--tasks", "quote", "--questions", "4"]


@pytest.fixture
def mine(made, tmp_path):
    """A copy of an artifact of the demo model, which a test may change."""
    return shutil.copytree(made, tmp_path / "mine")


def test_the_arm_is_that_of_a_recipe_that_pools(tmp_path):
    model = save_tiny(tmp_path / "model", num_key_value_heads=2)
    made = {}
    for pooling in ("head", "layer"):
        changes = {"data": TEXT, "sink": 16, "recent": 64, "pooling": pooling}
        recipe = PRESETS["oscar"].model_copy(update=changes)
        made[pooling] = calibrate(Job(str(model), recipe, tmp_path / pooling, device="cpu"))
    assert made["head"].rotations.per_head
    options = dict(tasks=TaskSettings(()), device="cpu", baselines=(), pooled=True)
    folders = [artifact.folder for artifact in made.values()]
    arms = evaluate(Evaluation(str(model), folders, TEXT, **options))["arms"]
    own = ["head", "layer", "head+feedback", "layer+feedback"]
    assert list(arms) == [*own, "head+pooled"], "the other one is pooled already"
    assert arms["head+pooled"]["text_losses"] == arms["layer"]["text_losses"]
    assert arms["head+pooled"]["text_losses"] != arms["head"]["text_losses"]


@pytest.mark.thorough
def test_an_export_that_pools_names_the_command_and_then_has_the_figures(inside, mine):
    words = ["export", mine, "--for", "vllm-oscar", "-o", "exported"]
    said = inside(*words).stderr
    (command,) = re.findall(r"to measure it: rotationzoo (.*)", said)
    assert command == f"evaluate demo {mine} --for vllm-oscar --save"
    printed = inside(*shlex.split(command), *SMALL, "--details")
    assert printed.returncode == 0, printed.stderr
    assert "+pooled: one rotation per layer" in printed.stdout
    (window,) = json.loads((mine / "evaluation.json").read_text())["windows"]
    assert list(window["arms"]) == ["mine", "mine+feedback", "mine+pooled", *BASELINES]
    own, pooled = window["arms"]["mine"], window["arms"]["mine+pooled"]
    words[-1] = "again"
    said = inside(*words).stderr
    costs = [arm["perplexity_increase"] for arm in (pooled, own)]
    assert (
        f"one rotation per layer cost this artifact: perplexity {costs[0]:+.2%} instead of "
        f"{costs[1]:+.2%}, {pooled['all_tasks']['answered']} of 4 "
        f"questions answered instead of {own['all_tasks']['answered']} (evaluation.json, format "
        "vllm, windows 0/0)"
    ) in said
    assert "to measure it" not in said
    notes = json.loads(Path("again/export.json").read_text())["notes"]
    assert any(note.startswith("one rotation per layer cost") for note in notes)
    assert "one rotation per layer" not in inside("export", mine, "--to", "sglang").stderr
    assert "+pooled: one rotation per layer" in (mine / "README.md").read_text()


def test_what_cannot_be_pooled_is_refused_before_a_model_is_read(inside, mine):
    (mine / "statistics.safetensors").unlink()
    with edited_manifest(mine) as manifest:
        del manifest["files"]["statistics.safetensors"]
    error = only_error(inside("evaluate", "no-such-model", mine, "--pooled"))
    assert "cannot be pooled: it has no statistics" in error
    error = only_error(inside("evaluate", "no-such-model", "--pooled"), 2)
    assert "--pooled is for artifacts with one rotation per KV head" in error


def test_names_are_unique_beside_those_of_pooled_arms(mine, tmp_path):
    artifact = Artifact.open(mine)
    taken = Artifact.open(shutil.copytree(mine, tmp_path / "mine+pooled"))
    arms = build_arms([artifact, taken], artifact.geometry, baselines=(), pooled=True)
    assert len({each.arm.name for each in arms}) == len(arms) == 6
