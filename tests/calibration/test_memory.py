"""What a dry run says of memory, held against what is allocated: term by term, and of a whole
job."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.models import save_tiny

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration import machine
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.memory import Footprint
from rotationzoo.calibration.search.choice import Choice
from rotationzoo.calibration.search.closed_forms import closed_forms, count_closed_forms
from rotationzoo.calibration.search.draws import SamplingSettings
from rotationzoo.calibration.search.frame import LayerData
from rotationzoo.calibration.search.layer import LayerSearch, Ranking
from rotationzoo.calibration.search.learn import LearningSettings
from rotationzoo.calibration.search.learn_group import learn_side
from rotationzoo.calibration.search.memory import TextLengths
from rotationzoo.calibration.search.model_divergence import ModelDivergence
from rotationzoo.calibration.search.sampling import take_samples
from rotationzoo.calibration.search.shelf import Shelf
from rotationzoo.model.geometry import Layer, geometry_of
from rotationzoo.model.projection import output_projections
from rotationzoo.recipe import PRESETS, Data, Search

# Of an estimate to what is allocated. Too little is what a user would find out by a crash.
LEAST, MOST = 0.9, 1.3
ROWS, LENGTH = 9, 512


def allocated(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """The most bytes of tensors that a call has at once, those it leaves, and its result."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now, result


@pytest.fixture(scope="module")
def medium():
    """A model whose tensors are far larger than what torch allocates beside them; a layer of it,
    sampled."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LENGTH,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    geometry = geometry_of(model)
    recipe = PRESETS["best"].model_copy(
        update={
            "sink": 16,
            "recent": 48,
            "data": Data(tokens=ROWS * LENGTH, length=LENGTH),
            "search": Search(queries=32, steps=2, texts=3),
        }
    )
    rows = list(torch.randint(0, 4096, (ROWS, LENGTH)))
    statistics = collect(model, geometry, [row[None] for row in rows[:6]], recipe)
    cache = Cache(sink=16, recent=48)
    sampling = SamplingSettings(rows[6:], rows[:6], cache, queries=32)
    _, sampled_bytes, samples = allocated(
        lambda: take_samples(model, geometry, geometry[:1], sampling, Shelf(0))
    )
    baseline = fit(statistics, recipe, geometry)
    projections = {0: output_projections(model, geometry)[0].read()[0]}
    data = LayerData(statistics[0], samples[0], projections)
    search = LayerSearch(geometry[0], data, recipe, baseline[0])
    needs = Footprint(recipe, geometry, config, batch=1, item=4, on_cpu=True)
    return SimpleNamespace(
        model=model,
        geometry=geometry,
        recipe=recipe,
        statistics=statistics,
        baseline=baseline,
        needs=needs,
        sample_bytes=sampled_bytes,
        search=search,
        rows=rows,
        cache=cache,
    )


def test_samples_are_as_large_as_planned(medium):
    lengths = TextLengths(held_out=[LENGTH] * 3, fitted=[LENGTH] * 6)
    assert TextLengths.from_recipe(medium.recipe, medium.recipe.search) == lengths
    needs = replace(medium.needs.search().layers, lengths=lengths)
    planned = needs.samples(medium.geometry[0], item=4) + needs.masks
    assert LEAST < planned / medium.sample_bytes < MOST  # measured 1.01


def test_trying_takes_what_is_planned(medium):
    search, layer = medium.search, medium.geometry[0]

    def search_layer() -> None:
        key = search.rank("key", search.make_forms("key")).chosen
        search.rank("value", search.make_forms("value"), key)

    most, _, _ = allocated(search_layer)
    lengths = TextLengths(held_out=[LENGTH] * 3, fitted=[LENGTH] * 6)
    needs = replace(medium.needs.search().layers, lengths=lengths)
    assert LEAST < needs.scoring(layer) / most < MOST  # measured 1.00


def test_learning_takes_what_is_planned(medium):
    search, layer = medium.search, medium.geometry[0]
    start = Choice(search.baseline.key.matrix, ["own", "own"], torch.zeros(3, 2))
    metric = search.data.moments["query"].second_moment
    ranking = Ranking(start, [start] * 3, metric, torch.ones(2, 2))
    settings = LearningSettings(steps=2, rate=0.01)
    most, _, _ = allocated(lambda: learn_side("key", [search], [ranking], settings))
    planned = medium.needs.search().layers.learning(layer, 1, item=0)
    assert LEAST < planned / most < MOST  # measured 0.93


def test_choosing_clip_ratios_takes_what_is_planned(medium):
    loss = ModelDivergence(medium.model, medium.geometry, medium.cache, None, medium.rows[8:])
    most, _, _ = allocated(lambda: loss.measure([medium.baseline]))
    assert LEAST < medium.needs.search().clip_search / most < MOST  # measured 1.07


def test_predictions_of_the_exact_model_are_kept_as_planned(medium):
    loss = ModelDivergence(medium.model, medium.geometry, medium.cache, None, medium.rows[6:])
    _, left, _ = allocated(lambda: loss.measure([medium.baseline]))
    search = medium.needs.search()
    assert LEAST < search.exact_states / left < MOST  # measured 0.99
    assert search.peak - replace(search, on_cpu=False).peak > search.exact_states


def test_statistics_and_rotations_are_as_large_as_planned(medium):
    sums = [moment for kinds in medium.statistics.values() for moment in kinds.values()]
    raw = sum(moment.second.nbytes + moment.first.nbytes for moment in sums)
    assert LEAST < medium.needs.statistics / raw < MOST
    matrices = [rotation.matrix for _, _, rotation in medium.baseline.each()]
    matrices += [rotation.feedback for _, _, rotation in medium.baseline.each()]
    assert medium.needs.rotations == sum(matrix.nbytes for matrix in matrices)


@pytest.mark.parametrize("dim", [16, 20, 64, 80, 128])
def test_candidates_are_as_many_as_counted(dim):
    eye = torch.eye(dim, dtype=torch.float64)[None]
    assert len(closed_forms(eye, eye)) == count_closed_forms(dim)


def test_projections_are_held_a_group_at_a_time(medium):
    """Those of a model of 70 B parameters would be 21.5 GB at once."""
    config = transformers.Qwen3Config(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    )
    geometry = [Layer(index, index, 64, 8, 128, 128) for index in range(80)]
    needs = Footprint(PRESETS["best"], geometry, config, batch=4, item=2, on_cpu=False)
    assert needs.search_peak() < 90e9


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
        "extends: best\nsink: 16\nrecent: 64\ndata: {tokens: 8192, length: 2048}\n"
        "search: {steps: 2, queries: 64, texts: 1}\n"
    )
    words = ["calibrate", model, "--recipe", "mine.yaml", "--device", "cpu", "--json"]
    planned = json.loads(command(*words, "--dry-run").stdout)["peak_memory_bytes"]
    made = command(*words, alone=True)
    assert made.returncode == 0, made.stderr
    assert 0.8 < planned / json.loads(made.stdout)["peak_memory_bytes"] < 1.6  # 0.91 to 1.01


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the two apart")
def test_the_peak_is_that_of_the_process_itself():
    """Linux hands the peak of a process on to those that it starts: a job would seem as large as
    what it was started from, here these tests."""
    words = (
        "import sys, types\n"
        "cuda = types.SimpleNamespace(is_available=lambda: False)\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)\n"
        "from rotationzoo.calibration.machine import peak_memory\n"
        "print(peak_memory())\n"
    )
    started = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert int(started.stdout) < machine.peak_memory() / 4


def test_where_the_system_does_not_tell_the_peak_it_is_asked_otherwise(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_STATUS", tmp_path / "status")
    assert machine.peak_memory() > 1e8
    (tmp_path / "status").write_text("VmPeak:\t 2000 kB\nVmHWM:\t    1000 kB\n")
    assert machine.peak_memory() == 1_024_000


# ---- what a dry run says beside it


def test_a_dry_run_names_the_memory_that_is_there(inside, monkeypatch):
    shown = json.loads(inside("calibrate", "demo", "--dry-run", "--json", "--device", "cpu").stdout)
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < shown["memory_bytes"] <= installed
    assert shown["search"] is None
    said = inside("calibrate", "demo", "--dry-run", "--device", "cpu").stdout
    assert "GB here\n" in said
    assert "not enough" not in said
    limit = inside.folder / "memory.max"
    limit.write_text("1000000\n")
    monkeypatch.setattr(machine, "_CONTAINER_LIMIT", limit)
    assert (
        "of the 1.0 MB here, which is not enough"
        in inside("calibrate", "demo", "--dry-run", "--device", "cpu").stdout
    )
    limit.write_text("max\n")
    assert machine.total_memory(on_cpu=True, spread=False) == installed


def test_memory_of_gpus_counts_where_the_job_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    sizes = [SimpleNamespace(total_memory=10), SimpleNamespace(total_memory=20)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes[device])
    main = machine.total_memory(on_cpu=True, spread=False)
    assert machine.total_memory(on_cpu=False, spread=False) == 20
    assert (
        machine.total_memory(on_cpu=False, spread=True)
        == machine.total_memory(on_cpu=True, spread=True)
        == main + 30
    )


def test_a_dry_run_names_the_search_and_its_budget(inside):
    words = ["calibrate", "demo", "--recipe", "best", "--dry-run"]
    shown = json.loads(inside(*words, "--budget", "7", "--json").stdout)
    assert (shown["search"]["steps"], shown["search"]["budget_minutes"]) == (300, 7)
    assert (
        "7 minutes for learning and clip ratios, beside what statistics and scoring take"
        in inside(*words, "--budget", "7").stdout.replace("\n  ", " ")
    )
    said = inside(*words).stdout.replace("\n  ", " ")
    assert (
        "Search: clip ratios, and closed forms for every head with 300 steps of learning from "
        "3 starts, chosen on 40 prompts with questions and up to 16 texts held out" in said
    )
    assert "no limit of time (--budget MINUTES sets one)" in said
