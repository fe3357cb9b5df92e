"""What is known of a job before a weight is read."""

import shutil

import pytest
from safetensors.torch import load_file
from support.jobs import RECIPE, job

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import plan
from rotationzoo.errors import RotationZooError


def test_the_plan_reads_only_the_config(tiny, tmp_path):
    (tmp_path / "model").mkdir()
    shutil.copy(tiny / "config.json", tmp_path / "model")
    planned = plan(job(tmp_path / "model", tmp_path))
    assert [(layer.kv_heads, layer.key_dim) for layer in planned.geometry] == [(2, 16)] * 2
    assert planned.weights_bytes > 0
    with pytest.raises(RotationZooError, match="tokenizer"):
        calibrate(job(tmp_path / "model", tmp_path))


def test_the_planned_sizes_are_those_that_come_out(calibrated, tiny, tmp_path):
    planned = plan(job(tiny, tmp_path)).artifact_bytes
    written = sum(file["size"] for file in calibrated.content["files"].values())
    assert planned <= written <= 1.5 * planned + 10_000  # headers and means besides


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("auto", 4)])
def test_a_plan_counts_weights_in_the_type_that_they_are_loaded_in(dtype, item, tiny, tmp_path):
    parameters = sum(t.numel() for t in load_file(tiny / "model.safetensors").values())
    # Spread over devices, `auto` is the checkpoint's own type, here float32.
    options = {"device_map": "auto"} if dtype == "auto" else {}
    size, float32_size = (
        plan(job(tiny, tmp_path, RECIPE, dtype=name, **options)).peak_memory_bytes
        for name in (dtype, "float32")
    )
    if item == 2:
        assert float32_size - size >= 2 * parameters
    else:
        assert abs(size / float32_size - 1) < 1e-3
