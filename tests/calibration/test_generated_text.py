"""Calibration on text that the model writes itself."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.jobs import interrupt_after, job, rotation_bytes
from support.models import save_tiny

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration import generate, model_run
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.errors import RotationZooError
from rotationzoo.model import loading
from rotationzoo.recipe import Data, Recipe

SELF = Data(source="self", tokens=1024, length=128, prompt_tokens=16)


def self_job(model, folder, **changes) -> Job:
    """A job that calibrates on text of the model's own."""
    return job(model, folder, Recipe(data=SELF), batch=2, **changes)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> Artifact:
    """What a job makes that nobody stops."""
    return calibrate(self_job(tiny, tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("stop", [("writing", 1), ("writing", 3), ("calibrating", 1)])
def test_a_stopped_job_goes_on_with_what_was_written(stop, whole, tiny, tmp_path):
    seen: list[tuple[str, int]] = []

    def interrupt(stage, done, total):
        seen.append((stage, done))
        if (stage, sum(name == stage for name, _ in seen) - 1) == stop:
            raise KeyboardInterrupt

    stopped = self_job(tiny, tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        calibrate(stopped, interrupt)
    assert stopped.unfinished
    again: list[tuple[str, int]] = []
    resumed = calibrate(stopped, lambda stage, done, total: again.append((stage, done)))
    written = [done for stage, done in again if stage == "writing"]
    assert written[0] == max(done for stage, done in seen if stage == "writing")
    assert rotation_bytes(resumed) == rotation_bytes(whole)
    assert resumed.content["calibration"] == whole.content["calibration"]
    assert [path.name for path in stopped.output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        RuntimeError(
            "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, "
            "when calling `cusolverDnCreate(handle)`."
        ),
    ],
    ids=["torch", "cusolver"],
)
def test_text_outlives_a_job_that_ran_out_of_memory(error, tiny, tmp_path, monkeypatch):
    """The next command is the one that its hint asks for: with another batch."""

    def fail(*arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(model_run, "collect", fail)
        with pytest.raises(RotationZooError, match="does not fit the device's memory"):
            calibrate(self_job(tiny, tmp_path))
    monkeypatch.setattr(generate, "_continue_prompts", None)
    calibrate(replace(self_job(tiny, tmp_path), batch=1))


def test_sums_are_never_joined_to_another_text(tiny, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        calibrate(self_job(tiny, tmp_path), interrupt_after(1))
    path = tmp_path / "out.checkpoint.text.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({name: text.flip(0) for name, text in load_file(path).items()}, path, metadata)
    with pytest.raises(RotationZooError, match="of another job: written differ"):
        calibrate(self_job(tiny, tmp_path))


def test_the_artifact_says_whose_text_it_was(whole, tiny):
    described = whole.content["calibration"]
    assert (described["source"], described["prompts"]) == ("self", "bundled")
    assert described["tokens"] == 1024
    prompts = whole.content["identity"]["text"]
    assert described["prompts_fingerprint"] == prompts != described["fingerprint"]
    assert (
        "1,024 tokens of prompts of `bundled` and of what the model made of them"
        in (whole.folder / "README.md").read_text()
    )
    again = calibrate(self_job(tiny, whole.folder.parent))
    assert again.content["run"] == whole.content["run"], "done already"


def test_the_settings_of_sampling_are_part_of_the_job(tiny, tmp_path):
    folder = save_tiny(tmp_path / "model")
    calibrate(self_job(folder, tmp_path))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    with pytest.raises(RotationZooError, match="sampling, generation_config differ"):
        calibrate(self_job(folder, tmp_path))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, "repetition_penalty": 1.2})
    )
    with pytest.raises(RotationZooError, match="another job: generation_config differ"):
        calibrate(self_job(folder, tmp_path))


def test_another_jobs_text_is_refused(tiny, tmp_path):
    save_file(
        {"0": torch.zeros(3, dtype=torch.long)},
        tmp_path / "out.checkpoint.text.safetensors",
        {"identity": "{}", "texts": "1"},
    )
    with pytest.raises(RotationZooError, match="of another job"):
        calibrate(self_job(tiny, tmp_path))
    calibrate(self_job(tiny, tmp_path, restart=True))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--length", "256"], "prompts of 256 tokens leave nothing to write in rows of 256"),
        (
            ["--length", "512", "--prompts", "absent.jsonl"],
            "there is no file absent.jsonl\nHint: check the path given with --prompts",
        ),
    ],
)
def test_what_cannot_be_written_gets_a_sentence(words, sentence, inside, tiny, monkeypatch):
    monkeypatch.setattr(loading, "load", None)  # before anything is computed
    result = inside("calibrate", tiny, "--data", "self", *words)
    assert result.returncode == 1
    assert sentence in result.stderr


def test_prompts_are_for_text_of_the_models_own(inside):
    result = inside("calibrate", "demo", "--prompts", "questions.jsonl")
    assert result.returncode == 2
    assert "--data self" in result.stderr
    result = inside("calibrate", "demo", "--data", "self", "--prompts", "self")
    assert result.returncode == 2
    assert "needs something to go on from" in result.stderr


def test_only_a_calibration_writes(inside):
    result = inside("evaluate", "demo", "--data", "self")
    assert result.returncode == 1
    assert "writes text of its own only where it is calibrated" in result.stderr
