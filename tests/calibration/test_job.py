"""The whole job through the library: what is known before a weight is read, what it writes, and how
it goes on where it was stopped."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.cases import quick_first
from support.jobs import RECIPE, SMALL, interrupt_after, job, rotation_bytes
from support.models import edit_config, write_jsonl
from support.recipes import QUICK
from support.tensors import stored_rotations, stored_statistics

from rotationzoo.artifact.layout import rotations_from, statistics_from
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.checks.verify import verify
from rotationzoo.cli.inspect import summarize
from rotationzoo.errors import RotationZooError
from rotationzoo.progress import silent
from rotationzoo.recipe import Data, Recipe
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.text import chats
from rotationzoo.writer import write_artifact


def test_the_files_keep_their_contract(calibrated):
    assert {p.name for p in calibrated.folder.iterdir()} == {
        "rotations.safetensors", "statistics.safetensors", "manifest.json", "README.md"
    }  # fmt: skip
    left = [path.name for path in calibrated.folder.parent.iterdir()]
    assert left == ["out"], "no checkpoint or temporary folder"
    rotations, statistics = stored_rotations(calibrated), stored_statistics(calibrated)
    manifest = calibrated.content
    assert manifest["schema"] == 1
    for layer in range(2):
        for side in ("key", "value"):
            assert rotations[f"layers.{layer}.{side}.rotation"].shape == (2, 16, 16)
            assert (rotations[f"layers.{layer}.{side}.eigenvalues"].diff() >= 0).all()
            ratio = 0.96 if side == "key" else 0.92
            assert rotations[f"layers.{layer}.{side}.clip"].tolist() == [ratio] * 2
            assert statistics[f"layers.{layer}.{side}.count"].item() == 8 * (256 - 64)
        for kind in ("query", "output"):
            assert statistics[f"layers.{layer}.{kind}.second_moment"].dtype == torch.float64
            assert statistics[f"layers.{layer}.{kind}.count"].item() == 2 * 8 * 256
    described = [manifest["calibration"][key] for key in ("source", "tokens", "rows")]
    assert described == ["bundled", 2048, 8]
    read = Recipe.model_validate(manifest["recipe"])
    assert read.hash == manifest["recipe_sha256"] == RECIPE.hash
    assert calibrated.identity == manifest["files"]["rotations.safetensors"]["sha256"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_recipe_makes_a_sound_artifact(name, tiny, tmp_path):
    recipe = PRESETS[name].model_copy(update={"data": SMALL})
    artifact = calibrate(job(tiny, tmp_path, recipe))
    verification = verify(artifact, str(tiny))
    assert verification.ok, verification.problems
    assert verification.orthogonality_error < 1e-6  # measured 6e-8
    assert (artifact.statistics is None) == (name in ("hadamard", "identity", "random"))
    heads = 1 if recipe.pooling == "layer" else 2
    assert stored_rotations(artifact)["layers.0.key.rotation"].shape == (heads, 16, 16)
    assert len(summarize(artifact)) == 2


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("base", ["oscar", "hadamard"])
def test_a_recipe_that_centers_keeps_the_mean(base, side, tiny, tmp_path):
    data = Data(tokens=512, length=256)
    recipe = PRESETS[base].model_copy(update={f"center_{side}s": True, "data": data})
    artifact = calibrate(job(tiny, tmp_path, recipe))
    assert verify(artifact).ok, verify(artifact).problems
    rotations, statistics = stored_rotations(artifact), stored_statistics(artifact)
    for name in (f"layers.{layer}.{side}.mean" for layer in (0, 1)):
        assert torch.equal(rotations[name], statistics[name].float())
    assert f"({side[0]} - mean) R_{side[0].upper()}" in (artifact.folder / "README.md").read_text()
    rotations[f"layers.1.{side}.mean"] += 1
    tensors = rotations_from(rotations), statistics_from(statistics)
    changed = write_artifact(artifact.folder, *tensors, dict(artifact.content))
    assert verify(changed).problems == [f"{side} mean not that of the statistics: layer 1"]


def test_the_composition_of_imported_files_cannot_be_calibrated(tiny, tmp_path):
    recipe = QUICK.model_copy(update={"composition": "given"})
    with pytest.raises(RotationZooError, match="stands for imported matrices"):
        calibrate(job(tiny, tmp_path, recipe))


# ---- stopping and resuming a job: what makes two jobs the same, and what is kept


@pytest.mark.parametrize(
    ("name", "stop"),
    quick_first([("oscar", 1), ("oscar-v1", 2), ("oscar-v1", 1), ("oscar-v1", 3)], 2),
)
def test_an_interrupted_job_resumes_to_the_same_bytes(name, stop, tiny, tmp_path):
    recipe = PRESETS[name].model_copy(update={"data": SMALL})
    batch = 4 if name == "oscar-v1" else 2  # four steps either way: v1 makes two passes
    whole = calibrate(job(tiny, tmp_path / "whole", recipe, batch=batch))
    stopped = job(tiny, tmp_path / "stopped", recipe, batch=batch)
    with pytest.raises(KeyboardInterrupt):
        calibrate(stopped, interrupt_after(stop))
    assert [p.name for p in stopped.output.parent.iterdir()] == ["out.checkpoint.safetensors"]
    steps = []
    resumed = calibrate(stopped, lambda stage, done, _: steps.append((stage, done)))
    first = next(done for stage, done in steps if stage == "calibrating")
    assert first == stop * batch * SMALL.length, "the checkpoint was not used"
    assert rotation_bytes(resumed) == rotation_bytes(whole)
    sums = [(made.folder / "statistics.safetensors").read_bytes() for made in (resumed, whole)]
    assert sums[0] == sums[1]
    assert [p.name for p in stopped.output.parent.iterdir()] == ["out"]


def test_a_job_resumes_on_another_day(copied_tiny, tmp_path, monkeypatch):
    """If the chat template writes the date, a resumed run uses the date of the first run."""
    template = "Today: {{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m.content }}"
    edit_config(copied_tiny, "tokenizer_config.json", chat_template=template + "{% endfor %}")
    chat = {"messages": [{"role": "user", "content": "some words " * 100}]}
    data = SMALL.model_copy(update={"source": str(write_jsonl(tmp_path / "c.jsonl", [chat] * 40))})
    asked = job(copied_tiny, tmp_path, RECIPE.model_copy(update={"data": data}), batch=2)

    def on(day: int) -> None:
        monkeypatch.setattr(chats, "date", SimpleNamespace(today=lambda: date(2024, 2, day)))

    on(28)
    with pytest.raises(KeyboardInterrupt):
        calibrate(asked, interrupt_after(1))
    on(29)
    made = calibrate(asked)
    assert made.manifest.identity["date"] == "2024-02-28"
    on(27)
    before, rotations = (made.folder / "manifest.json").stat().st_mtime_ns, rotation_bytes(made)
    assert calibrate(asked).folder.joinpath("manifest.json").stat().st_mtime_ns == before
    again = calibrate(replace(asked, restart=True))
    assert again.manifest.identity["date"] == "2024-02-27"
    assert rotation_bytes(again) != rotations


def test_an_interrupted_restart_resumes(tiny, tmp_path):
    """The old artifact stays until the new one is whole, and the printed command goes on with the
    new one."""
    first = calibrate(job(tiny, tmp_path, batch=2))
    other = PRESETS["oscar-v1"].model_copy(update={"data": SMALL})
    whole = calibrate(job(tiny, tmp_path / "whole", other, batch=2))
    with pytest.raises(KeyboardInterrupt):
        calibrate(job(tiny, tmp_path, other, batch=2, restart=True), interrupt_after(2))
    assert verify(first).ok
    progress = []
    resumed = calibrate(job(tiny, tmp_path, other, batch=2), lambda *step: progress.append(step))
    counted = [(done, total) for stage, done, total in progress if stage == "calibrating"]
    tokens = 2 * SMALL.tokens
    assert counted[0][0] > 0, "the first batch was not read again"
    assert counted[-1] == (tokens, tokens)
    assert resumed.identity == whole.identity
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}


def test_the_config_is_part_of_the_job(copied_tiny, tmp_path):
    """The same weights with another RoPE scaling are another model."""
    first = calibrate(job(copied_tiny, tmp_path))
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    edit_config(copied_tiny, rope_parameters=rope)
    with pytest.raises(RotationZooError, match="another job: config differ"):
        calibrate(job(copied_tiny, tmp_path))
    assert "another model or config" in verify(first, str(copied_tiny)).problems[0]


@pytest.mark.parametrize("finished", quick_first([True, False]), ids=["artifact", "checkpoint"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device_map": "auto"}, "device_map"),
        ({"device_map": "auto", "max_memory": "cpu=9GB"}, "device_map, max_memory"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"batch": 1}, "batch"),
    ],
)
def test_another_job_is_refused_with_what_differs(change, named, finished, tiny, tmp_path):
    options = {"dtype": "float32", "batch": 2}
    with nullcontext() if finished else pytest.raises(KeyboardInterrupt):
        calibrate(job(tiny, tmp_path, **options), silent if finished else interrupt_after(1))
    what = "holds the work of another job" if finished else "is of another job"
    with pytest.raises(RotationZooError, match=f"{what}: {named} differ"):
        calibrate(job(tiny, tmp_path, **{**options, **change}))


def test_the_number_of_threads_is_part_of_the_job(tiny, tmp_path, set_threads):
    """Sums depend on how many threads they are split between, and not on how many cores there
    are."""
    set_threads(3)
    artifact = calibrate(job(tiny, tmp_path))
    assert artifact.content["run"]["threads"] == 3
    assert artifact.content["identity"]["threads"] == "3"
    set_threads(1)
    with pytest.raises(RotationZooError, match="another job: threads differ"):
        calibrate(job(tiny, tmp_path))


def test_an_artifact_that_cannot_be_replaced_is_put_back(calibrated, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(calibrated.folder, tmp_path / "out"))
    rename = Path.rename

    def fail(self, target):
        if self.name == ".out.partial":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(RotationZooError, match="cannot be written: No space left"):
        write_artifact(folder, calibrated.rotations, None, calibrated.content)
    monkeypatch.undo()
    assert verify(Artifact.open(folder)).ok
    folder.rename(tmp_path / ".out.old")  # as if killed between the two renames
    assert verify(Artifact.open(folder)).ok
