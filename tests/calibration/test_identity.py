"""Which job it is: what makes two jobs the same, and how they are told apart."""

import shutil
from pathlib import Path

import pytest
import torch
from support.jobs import interrupt_after, job
from support.models import edit_config

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError


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


def test_threads_are_those_that_torch_computes_with(tiny, tmp_path):
    """Sums depend on how many threads they are split between, and not on how many cores there
    are."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        artifact = calibrate(job(tiny, tmp_path))
        assert artifact.content["run"]["threads"] == 3
        assert artifact.content["identity"]["threads"] == "3"
        torch.set_num_threads(1)
        with pytest.raises(RotationZooError, match="another job: threads differ"):
            calibrate(job(tiny, tmp_path))
    finally:
        torch.set_num_threads(before)
