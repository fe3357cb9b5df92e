"""What a dry run says of memory, held against what is allocated: term by term, and of a whole
job."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from support import architectures
from support.models import save_tiny
from support.recipes import QUICK

from rotationzoo.artifact.fit import fit
from rotationzoo.calibration import memory
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.memory import Footprint
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import Data

# Of an estimate to what is allocated. Too little is what a user would find out by a crash.
LEAST, MOST = 0.9, 1.3
ROWS, LENGTH = 6, 512


@pytest.fixture(scope="module")
def medium():
    """A model whose tensors are far larger than what torch allocates beside them."""
    sizes = dict(vocab_size=4096, hidden_size=256, intermediate_size=512, head_dim=32)
    counts = dict(num_hidden_layers=2, num_attention_heads=8, max_position_embeddings=LENGTH)
    model = architectures.build("qwen3", **sizes, **counts)
    geometry = geometry_of(model)
    recipe = QUICK.model_copy(
        update={"sink": 16, "recent": 48, "data": Data(tokens=ROWS * LENGTH, length=LENGTH)}
    )
    batches = torch.randint(0, 4096, (ROWS, LENGTH)).split(1)
    statistics = collect(model, geometry, list(batches), recipe)
    return SimpleNamespace(
        statistics=statistics,
        rotations=fit(statistics, recipe, geometry),
        needs=Footprint(recipe, geometry, model.config, batch=1, item=4, on_cpu=True),
    )


def test_statistics_and_rotations_are_as_large_as_planned(medium):
    sums = [moment for kinds in medium.statistics.values() for moment in kinds.values()]
    raw = sum(moment.second.nbytes + moment.first.nbytes for moment in sums)
    assert LEAST < medium.needs.statistics / raw < MOST
    matrices = [rotation.matrix for _, _, rotation in medium.rotations.each()]
    matrices += [rotation.feedback for _, _, rotation in medium.rotations.each()]
    assert medium.needs.rotations == sum(matrix.nbytes for matrix in matrices)


@pytest.mark.thorough
def test_a_whole_job_takes_what_the_dry_run_says(command, tmp_path):
    """The peak of the process itself, libraries and the allocator's holes included."""
    model = save_tiny(
        tmp_path / "model",
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        num_hidden_layers=1,
    )
    (command.folder / "mine.yaml").write_text(
        "sink: 16\nrecent: 64\ndata: {tokens: 8192, length: 2048}\n"
    )
    words = ["calibrate", model, "--recipe", "mine.yaml", "--device", "cpu", "--json"]
    planned = json.loads(command(*words, "--dry-run").stdout)["peak_memory_bytes"]
    made = command(*words, alone=True)
    assert made.returncode == 0, made.stderr
    assert 0.8 < planned / json.loads(made.stdout)["peak_memory_bytes"] < 1.6  # 0.91 to 1.01


def test_where_the_system_does_not_tell_the_peak_it_is_asked_otherwise(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    assert memory.peak_memory() > 1e8
    (tmp_path / "status").write_text("VmPeak:\t 2000 kB\nVmHWM:\t    1000 kB\n")
    assert memory.peak_memory() == 1_024_000


# ---- what a dry run says beside it


def test_a_dry_run_names_the_memory_that_is_there(inside, monkeypatch):
    shown = json.loads(inside("calibrate", "demo", "--dry-run", "--json", "--device", "cpu").stdout)
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < shown["memory_bytes"] <= installed
    said = inside("calibrate", "demo", "--dry-run", "--device", "cpu").stdout
    assert "GB here\n" in said
    assert "not enough" not in said
    limit = inside.folder / "memory.max"
    limit.write_text("1000000\n")
    monkeypatch.setattr(memory, "_CONTAINER_LIMIT", limit)
    assert (
        "of the 1.0 MB here, which is not enough"
        in inside("calibrate", "demo", "--dry-run", "--device", "cpu").stdout
    )
    limit.write_text("max\n")
    assert memory.total_memory(on_cpu=True, spread=False) == installed


def test_memory_of_gpus_counts_where_the_job_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    sizes = [SimpleNamespace(total_memory=10), SimpleNamespace(total_memory=20)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes[device])
    main = memory.total_memory(on_cpu=True, spread=False)
    assert memory.total_memory(on_cpu=False, spread=False) == 20
    assert (
        memory.total_memory(on_cpu=False, spread=True)
        == memory.total_memory(on_cpu=True, spread=True)
        == main + 30
    )
