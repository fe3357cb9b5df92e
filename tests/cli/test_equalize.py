"""`calibrate --equalize` and `--feedback`, and what the other commands say of their artifacts."""

import json

import pytest
from support.command_line import SMALL, only_error
from support.models import save_family, save_tiny


@pytest.fixture
def folder(inside, tmp_path):
    save_tiny(tmp_path / "tiny")
    done = inside("calibrate", tmp_path / "tiny", "--equalize", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["recipe"] == "oscar-equalized"
    assert result["artifact"].endswith("tiny-oscar-equalized")
    return result["artifact"]


def test_an_equalised_artifact_is_shown_verified_and_evaluated(inside, tmp_path, folder):
    layers = json.loads(inside("inspect", folder, "--json").stdout)["layers"]
    for layer in layers:
        for side in ("key", "value"):
            lowest, highest = layer[side]["equalizer"]
            assert 0 < lowest <= highest
        assert layer["value"]["equalizer"][0] < 1 < layer["value"]["equalizer"][1]
    assert "Equalized: factors of key channels " in inside("inspect", folder).stdout
    sound = inside("verify", folder, "--model", tmp_path / "tiny", "--json")
    assert json.loads(sound.stdout)["problems"] == []
    member = inside("verify", folder, "--model", tmp_path / "tiny", "--run")
    assert member.returncode == 0, member.stderr


def test_a_dry_run_says_why_a_model_cannot_be_equalized(inside, tmp_path):
    save_family("llama4", tmp_path / "normed", weights=False)
    words = "calibrate", tmp_path / "normed", "--equalize", *SMALL
    refusal = json.loads(inside(*words, "--dry-run", "--json").stdout)["refusal"]
    assert "keys that cannot be scaled exactly" in refusal
    error = only_error(inside(*words), 1)
    assert refusal in error


def test_feedback_is_left_out_of_a_preset_that_has_it(inside):
    words = "calibrate", "demo", "--dry-run"
    assert "choose codes by error feedback" in inside(*words).stdout
    without = inside(*words, "--no-feedback")
    assert "choose codes" not in without.stdout
    assert "demo-oscar-nearest" in without.stdout
