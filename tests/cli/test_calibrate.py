"""`calibrate` as a user meets it: an empty folder, models and texts from everywhere, and a job that
is stopped and goes on where it was."""

import json
import os
import signal
from pathlib import Path

import pytest
from support.cases import quick_first
from support.command_line import left_behind, only_error, stop_once, succeeded, without_stages
from support.models import edited_weights, save_tiny
from support.published import ok, publish_folder
from typer.testing import CliRunner

from rotationzoo.cli.app import app

SHORT = ["--tokens", "1024", "--length", "256"]
KEYS = {"artifact", "model", "revision", "recipe", "layers", "tokens", "seconds"}


def test_the_journey_calibrate_inspect_verify(inside, monkeypatch):
    first = inside("calibrate", "demo", *SHORT)
    assert "demo: rotations of 4 layers, from 1,024 tokens" in first.stdout
    assert "1,024 tokens in" in first.stdout
    result = ok(again := inside("calibrate", "demo", "--json", *SHORT))
    assert "already done" not in first.stderr
    assert "already done" in again.stderr
    assert KEYS | {"peak_memory_bytes"} <= result.keys()
    known = {"model": "demo", "recipe": "transform", "layers": 4, "tokens": 1024}
    assert known.items() <= result.items()
    assert result["orthogonality_error"] < 1e-6
    folder = result["artifact"]
    assert first.stderr.splitlines()[-1] == f"Next: rotationzoo evaluate demo {folder} --save"
    assert left_behind(inside)[0:2] == ["rotations", folder]
    assert inside("calibrate", "demo", "--quiet", *SHORT).stdout.strip() == folder

    shown = json.loads(inside("inspect", folder, "--json").stdout)
    assert [layer["layer"] for layer in shown["layers"]] == [0, 1, 2, 3]
    sides = [layer[side] for layer in shown["layers"] for side in ("key", "value")]
    assert all(side["bits"] > 0 for side in sides)
    assert all(0 < ratio <= 1 for side in sides for ratio in side["clip_ratios"])
    monkeypatch.setenv("COLUMNS", "80")
    table = inside("inspect", folder).stdout
    assert len(table.strip().splitlines()) == 2 + 2 * 4 + 2, "notes on names and means"
    assert "…" not in table

    shown = ok(inside("verify", folder, "--model", "demo", "--json"))
    assert shown.pop("checked")[-1] == "the weights of demo"
    assert shown == {
        "ok": True,
        "problems": [],
        "orthogonality_error": result["orthogonality_error"],
        "signature": {"state": "unsigned", "signer": None},
    }
    with open(inside.folder / folder / "rotations.safetensors", "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x00" * 8)
    broken = inside("verify", folder, "--json")
    assert (broken.returncode, json.loads(broken.stdout)["ok"]) == (1, False)
    assert "must not be used" in broken.stderr


def test_a_hub_model_is_downloaded_pinned_and_then_works_offline(zoo, tiny, monkeypatch):
    publish_folder(zoo.hf, "someone/tiny", tiny)
    words = ["calibrate", "someone/tiny", "--quick", *SHORT, "--json"]
    done = ok(zoo.run(*words))
    assert done["revision"] == zoo.hf.head("someone/tiny")
    asked = [request for request in zoo.hf.requests if "safetensors" in request]
    assert asked, "the weights came from the hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = len(zoo.hf.requests)
    ok(zoo.run(*words, "--output", "again"))
    assert len(zoo.hf.requests) == before


def test_what_the_hub_does_not_have(zoo, tiny):
    publish_folder(zoo.hf, "someone/tiny", tiny)
    unknown = zoo.run("calibrate", "someone/tiny", "--revision", "v9")
    assert "no revision v9" in only_error(unknown)
    missing = zoo.run("calibrate", "someone/tinny")
    assert "there is no model someone/tinny" in only_error(missing)


def test_a_model_of_zeros_is_calibrated(inside, tmp_path):
    model = save_tiny(tmp_path / "zeros")
    with edited_weights(model) as weights:
        for tensor in weights.values():
            tensor.zero_()
    succeeded(inside("calibrate", model, "--quick", *SHORT, "--output", "out"))
    assert "nan" not in inside("inspect", "out").stdout


@pytest.mark.thorough
def test_the_fewest_bits_that_keep_enough_are_found_and_served(inside, induction, monkeypatch):
    from rotationzoo.evaluation import decision

    monkeypatch.setattr(decision, "FEWEST_ANSWERS", 8)
    words = ["calibrate", induction, "--tokens", 1024, "--length", 512, "--lengths", 512]
    ran = inside(*words, "--keep", 5)
    assert ran.returncode == 0, ran.stderr
    folder = "rotations/induction-transform-2-bits"
    assert f"Folder: {folder}\nServe it: induction-transform-2-bits keeps" in ran.stdout
    assert ran.stderr.endswith(f"Next: rotationzoo serve {induction} --rotations {folder}\n")
    refused = inside(*words, "--keep", 99.9)
    assert refused.returncode == 1
    assert "nothing shows that 99.9% of the answers are kept" in refused.stderr


WORDS = ["--quick", "--tokens", "4096", "--length", "512", "--batch", "1", "--output"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The artifact of a calibration that nobody stops."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    done = CliRunner().invoke(app, ["calibrate", "demo", *WORDS, str(folder)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize(
    "how", quick_first([signal.SIGINT, signal.SIGKILL]), ids=["ctrl-c", "kill -9"]
)
def test_stopped_half_way_and_run_again(command, program, inside, whole, how):
    words = [*WORDS, "out"]
    start = [*program, "calibrate", "demo", *words]
    checkpoint = command.folder / "out.checkpoint.safetensors"
    code, errors = stop_once(checkpoint.exists, how, start, command.folder, command.environment)
    assert "out" not in left_behind(command), "stopped before it was done"
    if how != signal.SIGKILL:
        assert code == 130, errors
        assert without_stages(errors) == [
            "Error: interrupted; what was done so far is saved",
            f"Hint: resume with: rotationzoo calibrate demo {' '.join(words)}",
        ]
    assert [name for name in left_behind(command) if not name.endswith(".lock")] in (
        ["out.checkpoint.safetensors"],
        ["out.checkpoint.safetensors", "out.checkpoint.safetensors.partial"],
    )
    succeeded(inside("calibrate", "demo", *words))
    assert not [name for name in left_behind(command) if "checkpoint" in name]
    for name in ("rotations.safetensors", "statistics.safetensors"):
        assert (command.folder / "out" / name).read_bytes() == (whole / name).read_bytes()
