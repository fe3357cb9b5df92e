"""Further arms of an artifact: with error feedback, and with one rotation per layer."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from support.command_line import edited_manifest, only_error
from support.models import save_tiny
from support.recipes import QUICK

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.cli import evaluate as evaluate_view
from rotationzoo.cli.output import Output
from rotationzoo.evaluation.arms import BASELINES, build_arms
from rotationzoo.evaluation.evaluate import evaluate
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.recipe import Data


def test_both_ways_to_write_keys_are_arms_and_the_nearest_is_judged(induction, mine, capsys):
    tasks = TaskSettings(("quote",), questions=8)
    text = Data(tokens=512, length=256)
    baselines = ["identity", "hadamard"]
    options = dict(baselines=tuple(baselines), device="cpu", save_to=[mine])
    job = Evaluation(str(induction), [mine], text, tasks, **options)
    measured = evaluate(job)
    report = measured.report()
    assert list(report["arms"]) == ["mine", "mine+feedback", *baselines]
    nearest, feedback = (report["arms"][name] for name in ("mine", "mine+feedback"))
    assert feedback["bits_at_length"] == nearest["bits_at_length"]
    # Measured .44 of it.
    assert feedback["attention_kl"] < 0.85 * nearest["attention_kl"]
    assert feedback["tasks"]["quote"]["questions"] == 8

    verdict = report["verdict"]
    assert "mine keeps " in verdict["words"][0]

    evaluate_view.show_evaluation(Output(False, False), measured)
    assert capsys.readouterr().out.splitlines() == verdict["words"] == str(measured).splitlines()
    evaluate_view.show_evaluation(Output(False, False), measured, details=True)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-3:] == verdict["words"]
    assert printed.count("\nmine+feedback ") >= 3
    assert "+feedback: the same rotations and the same bytes" in printed
    saved = json.loads((mine / "evaluation.json").read_text())
    assert list(saved["windows"][0]["arms"]) == ["mine", "mine+feedback", *baselines]
    assert saved["windows"][0]["verdict"] == verdict
    assert Artifact.open(mine).manifest.metrics.evaluation.arms["mine+feedback"].tasks
    card = (mine / "README.md").read_text()
    assert "| mine+feedback |" in card
    assert "+feedback: the same rotations and the same bytes" in card
    assert f"* {verdict['words'][0]}\n" in card


def test_arms_of_artifacts_come_first_and_no_two_have_one_name(induction, mine, tmp_path):
    taken = shutil.copytree(mine, tmp_path / "mine+feedback")
    artifacts = [Artifact.open(folder) for folder in (taken, mine, mine)]
    arms = build_arms(artifacts, artifacts[0].geometry)
    # The second would give its arm with error feedback the name of the first.
    hashed = f"mine {artifacts[0].identity[:8]}"
    assert [each.name for each in arms[:3]] == ["mine+feedback", hashed, f"{hashed} (3)"]
    assert len({each.about.name for each in arms}) == len(arms) == 6 + len(BASELINES)
    assert [each.about.rounding for each in arms[:6]] == ["nearest"] * 3 + ["feedback"] * 3


TEXT = Data(tokens=1024, length=256)
SMALL = ["--tokens", "1024", "--length", "256", "--tasks", "quote", "--questions", "4"]


@pytest.fixture
def copied(made, tmp_path):
    """A copy of an artifact of the demo model, which a test may change."""
    return shutil.copytree(made, tmp_path / "copied")


def test_the_arm_is_that_of_a_recipe_that_pools(tmp_path):
    model = save_tiny(tmp_path / "model", num_key_value_heads=2)
    made = {}
    for pooling in ("head", "layer"):
        changes = {"data": TEXT, "sink": 16, "recent": 64, "pooling": pooling}
        recipe = QUICK.model_copy(update=changes)
        made[pooling] = calibrate(Job(str(model), recipe, tmp_path / pooling, device="cpu"))
    assert made["head"].rotations.per_head
    options = dict(tasks=TaskSettings(()), device="cpu", baselines=(), pooled=True)
    folders = [artifact.folder for artifact in made.values()]
    arms = evaluate(Evaluation(str(model), folders, TEXT, **options)).report()["arms"]
    own = ["head", "layer", "head+feedback", "layer+feedback"]
    assert list(arms) == [*own, "head+pooled"], "the other one is pooled already"
    assert arms["head+pooled"]["text_losses"] == arms["layer"]["text_losses"]
    assert arms["head+pooled"]["text_losses"] != arms["head"]["text_losses"]


@pytest.mark.thorough
def test_an_export_that_pools_names_the_command_and_then_has_the_figures(inside, copied):
    words = ["export", copied, "--for", "vllm-oscar", "-o", "exported"]
    said = inside(*words).stderr
    (command,) = re.findall(r"to measure it: rotationzoo (.*)", said)
    assert command == f"evaluate demo {copied} --for vllm-oscar --save"
    printed = inside(*shlex.split(command), *SMALL, "--details")
    assert printed.returncode == 0, printed.stderr
    assert "+pooled: one rotation per layer" in printed.stdout
    (window,) = json.loads((copied / "evaluation.json").read_text())["windows"]
    assert list(window["arms"]) == ["copied", "copied+feedback", "copied+pooled", *BASELINES]
    own, pooled = window["arms"]["copied"], window["arms"]["copied+pooled"]
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
    assert "one rotation per layer" not in inside("export", copied, "--to", "sglang").stderr
    assert "+pooled: one rotation per layer" in (copied / "README.md").read_text()


def test_what_cannot_be_pooled_is_refused_before_a_model_is_read(inside, copied):
    (copied / "statistics.safetensors").unlink()
    with edited_manifest(copied) as manifest:
        del manifest["files"]["statistics.safetensors"]
    error = only_error(inside("evaluate", "no-such-model", copied, "--pooled"))
    assert "cannot be pooled: it has no statistics" in error
    error = only_error(inside("evaluate", "no-such-model", "--pooled"), 2)
    assert "--pooled is for artifacts with one rotation per KV head" in error


def test_names_are_unique_beside_those_of_pooled_arms(copied, tmp_path):
    artifact = Artifact.open(copied)
    taken = Artifact.open(shutil.copytree(copied, tmp_path / "copied+pooled"))
    arms = build_arms([artifact, taken], artifact.geometry, baselines=(), pooled=True)
    assert len({each.name for each in arms}) == len(arms) == 6
