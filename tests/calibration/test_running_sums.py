"""The sums of a calibration under way: added as on a GPU, stopped in the middle of a batch, saved
now and then."""

import pytest
import torch
from support import architectures

from rotationzoo.calibration import checkpoint as checkpoints
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.collect import collect
from rotationzoo.linalg import run_sums
from rotationzoo.linalg.moments import Moment
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import PRESETS, Recipe

BATCHES = list(torch.randint(3, 59, (3, 2, 32), generator=torch.Generator().manual_seed(2)))
RECIPE = Recipe(sink=4, recent=6)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Call it to have rows of every type but float64 added in runs."""

    def switch() -> None:
        monkeypatch.setattr(run_sums, "on_tensor_cores", lambda rows: rows.dtype != torch.float64)

    return switch


def differences(statistics, expected):
    """The relative differences of all second moments, means and weights."""
    for layer, moments in expected.items():
        for kind, wanted in moments.items():
            moment = statistics[layer][kind]
            for name in ("second_moment", "mean", "weight"):
                value, exact = getattr(moment, name), getattr(wanted, name)
                yield ((value - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "mimo_v2_flash"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["oscar-v1", "oscar"])
def test_runs_of_whole_batches_give_the_definition(name, dtype, recipe, as_on_a_gpu):
    model = architectures.build(name).to(dtype)
    geometry = geometry_of(model)
    chosen = PRESETS[recipe].model_copy(update={"sink": 4, "recent": 6})
    expected = collect(model, geometry, BATCHES, chosen)
    as_on_a_gpu()
    statistics = collect(model, geometry, BATCHES, chosen)
    largest = max(differences(statistics, expected))
    assert 0 < largest < 1e-6  # measured 2e-7


def test_batches_add_up_in_float64_whoever_takes_them(as_on_a_gpu):
    model = architectures.build("qwen3").bfloat16()
    geometry = geometry_of(model)
    as_on_a_gpu()
    whole = collect(model, geometry, BATCHES, RECIPE)
    others = collect(model, geometry, BATCHES[::2], RECIPE)
    part = collect(model, geometry, BATCHES[1::2], RECIPE)
    for layer, moments in part.items():
        for kind in moments:
            others[layer][kind] = others[layer][kind] + moments[kind]
    assert max(differences(others, whole)) < 1e-14  # measured 2e-16


def interrupt_in(model, calls):
    """Raise Ctrl-C in the given call of the model's third layer."""
    counted = []

    def count(*_):
        counted.append(None)
        if len(counted) == calls:
            raise KeyboardInterrupt

    return model.model.layers[2].register_forward_hook(count)


def test_ctrl_c_in_the_middle_of_a_batch_saves_the_batches_before(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_SPEED", 1.0)  # so that nothing is saved in between
    model = architectures.build("qwen3")
    geometry = geometry_of(model)
    expected = collect(model, geometry, BATCHES, RECIPE)
    path = tmp_path / "sums.safetensors"
    hook = interrupt_in(model, calls=3)
    with pytest.raises(KeyboardInterrupt):
        collect(model, geometry, BATCHES, RECIPE, Checkpoint(path, {}))
    hook.remove()
    steps = []

    def note(stage, done, total):
        steps.append(done)

    statistics = collect(model, geometry, BATCHES, RECIPE, Checkpoint(path, {}), note)
    assert steps == [2 * 64, 3 * 64]  # tokens: two batches were saved
    assert max(differences(statistics, expected)) == 0


def test_nothing_is_saved_of_the_first_batch(tmp_path):
    model = architectures.build("qwen3")
    geometry = geometry_of(model)
    path = tmp_path / "sums.safetensors"
    interrupt_in(model, calls=1)
    with pytest.raises(KeyboardInterrupt):
        collect(model, geometry, BATCHES, RECIPE, Checkpoint(path, {}))
    assert not path.exists()


def test_a_save_that_would_take_long_waits(tmp_path, monkeypatch):
    """A save that takes a second comes after 20 seconds of work."""
    statistics = {0: {"key": Moment.zeros(1, 4)}}
    size = statistics[0]["key"].second.nbytes
    now = [100.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(checkpoints, "_SPEED", float(size))
    checkpoint = Checkpoint(tmp_path / "sums.safetensors", {})
    for later, is_saved in ((0, False), (19, False), (2, True)):
        now[0] += later
        assert checkpoint.save(statistics, 1) is is_saved
    assert checkpoint.save(statistics, 2, at_once=True)
