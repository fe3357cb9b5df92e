"""Stopping a job and going on with it: what makes two jobs the same, and what is kept."""

import shutil
from pathlib import Path

import pytest
from support.jobs import RECIPE, SMALL, interrupt_after, job, rotation_bytes
from support.models import edit_config

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.recipe.loading import PRESETS, override
from rotationzoo.writer import write_artifact


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("name", ["oscar", "oscar-v1"])
def test_an_interrupted_job_goes_on_to_the_same_bytes(name, stop, tiny, tmp_path):
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
    assert (resumed.folder / "statistics.safetensors").read_bytes() == (
        whole.folder / "statistics.safetensors"
    ).read_bytes()
    assert [p.name for p in stopped.output.parent.iterdir()] == ["out"]


def test_a_checkpoint_of_another_job_is_refused_until_restart(tiny, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        calibrate(job(tiny, tmp_path, batch=2), interrupt_after(1))
    with pytest.raises(RotationZooError, match=r"of another job: batch differs$"):
        calibrate(job(tiny, tmp_path, batch=4))
    calibrate(job(tiny, tmp_path, batch=4, restart=True))


def test_an_interrupted_restart_goes_on(tiny, tmp_path):
    """The old artifact stays until the new one is whole, and the printed command goes on with the
    new one."""
    first = calibrate(job(tiny, tmp_path, batch=2))
    other = PRESETS["oscar-v1"].model_copy(update={"data": SMALL})
    whole = calibrate(job(tiny, tmp_path / "whole", other, batch=2))
    with pytest.raises(KeyboardInterrupt):
        calibrate(job(tiny, tmp_path, other, batch=2, restart=True), interrupt_after(2))
    assert verify(first).ok
    progress = []
    resumed = calibrate(
        job(tiny, tmp_path, other, batch=2),
        lambda stage, done, total: progress.append((stage, done, total)),
    )
    counted = [(done, total) for stage, done, total in progress if stage == "calibrating"]
    tokens = 2 * SMALL.tokens
    assert counted[0][0] > 0, "the first batch was not read again"
    assert counted[-1] == (tokens, tokens)
    assert resumed.identity == whole.identity
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}


def test_the_config_is_part_of_the_job(tiny, tmp_path):
    """The same weights with other RoPE scaling are another model."""
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    first = calibrate(job(model, tmp_path))
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    edit_config(model, rope_parameters=rope)
    with pytest.raises(RotationZooError, match="another job: config differ"):
        calibrate(job(model, tmp_path))
    assert "another model or config" in verify(first, str(model)).problems[0]


def stopped_after_one_batch(job: Job) -> Job:
    with pytest.raises(KeyboardInterrupt):
        calibrate(job, interrupt_after(1))
    return job


@pytest.mark.parametrize("finished", [True, False], ids=["artifact", "checkpoint"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device_map": "auto"}, "device_map"),
        ({"device_map": "auto", "max_memory": "cpu=9GB"}, "device_map, max_memory"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"batch": 1}, "batch"),
    ],
)
def test_another_job_is_told_by_what_differs(change, named, finished, tiny, tmp_path):
    options = {"dtype": "float32", "batch": 2}
    first = job(tiny, tmp_path, **options)
    calibrate(first) if finished else stopped_after_one_batch(first)
    what = "holds the work of another job" if finished else "is of another job"
    with pytest.raises(RotationZooError, match=f"{what}: {named} differ"):
        calibrate(job(tiny, tmp_path, **{**options, **change}))


def test_threads_are_those_that_torch_computes_with(tiny, tmp_path, set_threads):
    """Sums depend on how many threads they are split between, and not on how many cores there
    are."""
    set_threads(3)
    artifact = calibrate(job(tiny, tmp_path))
    assert artifact.content["run"]["threads"] == 3
    assert artifact.content["identity"]["threads"] == "3"
    set_threads(1)
    with pytest.raises(RotationZooError, match="another job: threads differ"):
        calibrate(job(tiny, tmp_path))


def test_another_recipes_work_is_kept_until_restart(tiny, tmp_path):
    first = calibrate(job(tiny, tmp_path))
    other = override(RECIPE, seed=2)
    with pytest.raises(RotationZooError, match="holds the work of another recipe"):
        calibrate(job(tiny, tmp_path, other))
    assert verify(first).ok
    assert calibrate(job(tiny, tmp_path, other, restart=True)).identity != first.identity


def test_a_folder_of_something_else_is_never_replaced(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("...")
    for restart in (False, True):
        with pytest.raises(RotationZooError, match="is no artifact"):
            calibrate(job(tiny, tmp_path, restart=restart))
    (tmp_path / "out" / "manifest.json").write_text('{"name": "a browser extension"}')
    with pytest.raises(RotationZooError, match="damaged"):
        calibrate(job(tiny, tmp_path, restart=True))
    assert (tmp_path / "out" / "thesis.tex").exists()
    artifact = calibrate(job(tiny, tmp_path / "other"))
    (artifact.folder / "notes.md").write_text("mine")
    with pytest.raises(RotationZooError, match=r"also holds notes\.md"):
        calibrate(job(tiny, tmp_path / "other", restart=True))


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
    folder.rename(tmp_path / ".out.old")  # as a kill between the two renames leaves it
    assert verify(Artifact.open(folder)).ok
