"""Stopping a job and going on with it."""

import pytest
from support.jobs import SMALL, interrupt_after, job, rotation_bytes

from rotationzoo.calibration.job import calibrate
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import PRESETS


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
