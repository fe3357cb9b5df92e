"""The memory estimate of a dry run, compared with allocations, and the rows that fit a pass."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import architectures
from support.jobs import SMALL, interrupt_after, job, rotation_bytes
from support.models import save_tiny

from rotationzoo.calibration import plan as memory
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import SIZED, Footprint, choose_batch, plan
from rotationzoo.errors import UsageError
from rotationzoo.model import placement
from rotationzoo.model.placement import USABLE, memory_limits, place_weights
from rotationzoo.recipe import Data, Recipe


@pytest.mark.thorough
def test_a_whole_job_takes_what_the_dry_run_says(command, tmp_path):
    """The peak of the whole process, with libraries and fragmentation."""
    model = save_tiny(
        tmp_path / "model", hidden_size=256, intermediate_size=512, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, num_hidden_layers=1,
    )  # fmt: skip
    recipe = "sink: 16\nrecent: 64\ndata: {tokens: 8192, length: 2048}\n"
    (command.folder / "mine.yaml").write_text(recipe)
    words = ["calibrate", model, "--recipe", "mine.yaml", "--device", "cpu", "--json"]
    planned = json.loads(command(*words, "--dry-run").stdout)["peak_memory_bytes"]
    made = command(*words, alone=True)
    assert made.returncode == 0, made.stderr
    assert 0.8 < planned / json.loads(made.stdout)["peak_memory_bytes"] < 1.6  # 0.91 to 1.01


def test_peak_memory_without_proc_status(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    assert memory.peak_memory() > 1e8
    (tmp_path / "status").write_text("VmPeak:\t 2000 kB\nVmHWM:\t    1000 kB\n")
    assert memory.peak_memory() == 1_024_000


# ---- the available memory in a dry run


def test_a_dry_run_shows_the_available_memory(inside, monkeypatch):
    words = "calibrate", "demo", "--dry-run", "--device", "cpu"
    shown = json.loads(inside(*words, "--json").stdout)
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < shown["memory_bytes"] <= installed
    said = inside(*words).stdout
    assert "GB here\n" in said
    assert "not enough" not in said
    group = control_groups(inside.folder, monkeypatch)
    write_limit(group, "1000000", "0")
    assert "of the 1.0 MB here, which is not enough" in inside(*words).stdout
    write_limit(group, "max", "0")
    assert memory.total_memory(on_cpu=True, spread=False) == installed


def test_memory_of_gpus_counts_where_the_job_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    sizes = [SimpleNamespace(total_memory=10), SimpleNamespace(total_memory=20)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes[device])
    main = memory.total_memory(on_cpu=True, spread=False)
    assert memory.total_memory(on_cpu=False, spread=False) == 20
    spread = [memory.total_memory(on_cpu=on_cpu, spread=True) for on_cpu in (False, True)]
    assert spread == [main + 30] * 2


# ---- the rows of a pass if weights are spread over devices


GB = 10**9


@pytest.fixture
def needs():
    """Rows of 2,048 tokens of a model with the widths of Qwen3-8B."""
    widths = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36)
    recipe = Recipe(data=Data(tokens=16 * 2048, length=2048))
    return Footprint(recipe, [], architectures.config("qwen3", **widths), item=2, on_cpu=True)


def test_rows_are_split_evenly_over_as_few_passes_as_possible(needs, monkeypatch):
    expected = {16: 16, 15: 8, 8: 8, 7: 6, 5: 4, 1: 1}
    for fitting, batch in expected.items():
        room = int((4 * GB + needs.pass_bytes(fitting)) / USABLE) + 2
        monkeypatch.setattr(placement, "free_memory", lambda device, room=room: room)
        assert choose_batch(needs, 100 * GB, {"cpu": 4 * GB}) == batch
    monkeypatch.setattr(placement, "free_memory", lambda device: 0)
    assert choose_batch(needs, 100 * GB, {"cpu": 4 * GB}) == 1, "the pass says that it does not fit"


def test_reserved_memory_gets_no_weights(monkeypatch):
    monkeypatch.setattr(placement, "free_memory", lambda device: 10 * GB)
    with place_weights("auto", None, reserved=2 * GB) as placed:
        assert placed["max_memory"] == {"cpu": 7 * GB}
    with place_weights("auto", "cpu=3GB", reserved=2 * GB) as placed:
        assert placed["max_memory"] == {"cpu": 3 * GB}
    monkeypatch.setattr(placement.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(placement.torch.cuda, "device_count", lambda: 2)
    with place_weights("auto", None, reserved=2 * GB) as placed:
        assert placed["max_memory"] == {0: 7 * GB, 1: 7 * GB, "cpu": 9 * GB}


def control_groups(folder: Path, monkeypatch, path="/") -> Path:
    """Put this process into the control group of a path, in a fake tree in the folder."""
    (folder / "cgroup").write_text(f"7:cpuset:/elsewhere\n0::{path}\n")
    monkeypatch.setattr(placement, "_GROUPS", folder / "cgroup")
    monkeypatch.setattr(placement, "_CONTAINER", folder / "groups")
    return folder / "groups"


def write_limit(group: Path, limit: str, used: str, stat: str = "") -> None:
    group.mkdir(parents=True, exist_ok=True)
    contents = {"memory.max": limit, "memory.current": used, "memory.stat": stat}
    for name, content in contents.items():
        (group / name).write_text(f"{content}\n")


def test_control_groups_limit_memory(tmp_path, monkeypatch):
    """The group of the process, such as a systemd unit, and its slice, but no other group."""
    top = control_groups(tmp_path, monkeypatch, "/user.slice/job.scope")
    own = top / "user.slice" / "job.scope"
    assert placement.free_memory("cpu") > GB / 10
    write_limit(top / "other.slice", "1000", "0")
    write_limit(own, "5000000", "2000000")
    assert placement.free_memory("cpu") == 3_000_000
    stat = "anon 1200000\nfile 800000\ninactive_file 500000\nactive_file 200000\nshmem 100000"
    write_limit(own, "5000000", "2000000", stat)
    assert placement.free_memory("cpu") == 3_700_000, "cached files take no room"
    write_limit(own, "max", "500000")
    assert placement.free_memory("cpu") > GB / 10
    write_limit(top / "user.slice", "7000000", "1000000")
    assert placement.free_memory("cpu") == 6_000_000
    assert memory.total_memory(on_cpu=True, spread=False) == 7_000_000
    write_limit(own, "4000000", "500000")
    assert placement.free_memory("cpu") == 3_500_000
    assert memory.total_memory(on_cpu=True, spread=False) == 4_000_000


def test_amounts_are_read_as_accelerate_reads_them():
    assert memory_limits("auto", "0=4GiB,cpu=1.5GB,") == {0: 4 << 30, "cpu": 1_500_000_000}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("gpu=4GiB", "unknown device 'gpu'"),
        ("cpu=4GiB,cpu=1GB", "names cpu twice"),
        ("99=4GiB,cpu=1GB", "names GPU 99, and this machine has"),
    ],
)
def test_wrong_devices_are_refused(given, says):
    with pytest.raises(UsageError, match=says), place_weights("auto", given):
        pass


def test_a_stopped_run_resumes_with_its_batch(tmp_path, monkeypatch):
    """Free memory changes between runs, but a checkpoint counts batches."""
    model = save_tiny(tmp_path / "model", num_hidden_layers=4)
    where = {"device_map": "auto", "max_memory": "cpu=150KB"}
    spread = job(model, tmp_path, batch=SIZED, dtype="float32", **where)
    expected = calibrate(replace(spread, output=tmp_path / "expected", batch=3))
    monkeypatch.setattr(Footprint, "pass_bytes", lambda needs, batch: batch * 100)
    room = [int((150_000 + 300) / USABLE) + 2]
    monkeypatch.setattr(placement, "free_memory", lambda device: room[0])
    assert SMALL.tokens // SMALL.length == 8
    assert plan(spread).job.batch == 3
    with pytest.raises(KeyboardInterrupt):
        calibrate(spread, interrupt_after(1))
    room[0] = 10**12
    assert plan(spread).job.batch == 3
    assert plan(replace(spread, restart=True)).job.batch == 8
    artifact = calibrate(spread)
    assert rotation_bytes(artifact) == rotation_bytes(expected)
    assert artifact.content["run"]["batch"] == 3
    # The finished artifact belongs to this job, whatever memory is free now.
    before = (artifact.folder / "manifest.json").stat().st_mtime_ns
    assert calibrate(spread).folder.joinpath("manifest.json").stat().st_mtime_ns == before
