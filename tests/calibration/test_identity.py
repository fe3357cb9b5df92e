"""Which job it is: what makes two jobs the same, and how they are told apart."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.jobs import SMALL, interrupt_after, job

from rotationzoo.calibration.identity import differences
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.calibration.record import identify_job
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.model import loading
from rotationzoo.model.source import find
from rotationzoo.text.rows import read_corpus


def test_the_config_is_part_of_the_job(tiny, tmp_path):
    """The same weights with other RoPE scaling are another model."""
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    first = calibrate(job(model, tmp_path))
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    (model / "config.json").write_text(json.dumps(config))
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
        ({"budget": 5.0}, "budget"),
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


@pytest.mark.parametrize(
    ("options", "device", "dtype"),
    [
        ({}, "x86_64 CPU, 64 threads", "torch.float32"),
        ({"budget": 5.0}, "x86_64 CPU, 64 threads", "torch.float32, 5.0 minutes"),
        (
            {"device_map": "auto", "dtype": "float32"},
            "x86_64 CPU, 64 threads, auto ",
            "torch.float32",
        ),
        (
            {
                "device_map": "auto",
                "max_memory": "0=20GiB,cpu=60GiB",
                "dtype": "float32",
                "budget": 0.5,
            },
            "x86_64 CPU, 64 threads, auto 0=20GiB,cpu=60GiB",
            "torch.float32, 0.5 minutes",
        ),
    ],
)
def test_work_of_an_earlier_version_is_the_same_job(
    options, device, dtype, tiny, tmp_path, monkeypatch
):
    """It had the budget in `dtype`, the device map in `device`, and the machine's cores for
    threads."""
    monkeypatch.setattr("rotationzoo.calibration.record.device_name", lambda device: "x86_64 CPU")
    source = find(str(tiny))
    text = read_corpus(SMALL, loading.load_tokenizer(source))
    present = identify_job(job(tiny, tmp_path, **options), source, text)
    new = ("threads", "device_map", "max_memory", "budget")
    shared = {key: value for key, value in present.items() if key not in new}
    saved = shared | {"device": device, "dtype": dtype}
    assert differences(saved, present) == []
    assert differences(saved, present | {"budget": "7.0"}) == ["budget"]
    assert differences(saved, present | {"device_map": "balanced"}) == ["device_map"]
    assert differences(saved | {"device": "aarch64" + device[6:]}, present) == ["device"]
    assert differences(
        {**present, "device": "NVIDIA H100 80GB HBM3, auto "}, present | {"device_map": "auto"}
    ) == ["device"]
