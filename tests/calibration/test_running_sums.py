"""The sums of a calibration under way: added as on a GPU, stopped in the middle of a batch, saved
now and then."""

from argparse import Namespace

import pytest
import torch
from loading import load_chosen
from support import architectures

from rotationzoo.artifact.fit import fit
from rotationzoo.calibration import checkpoint as checkpoints
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.collect import collect
from rotationzoo.codec import int2
from rotationzoo.linalg import run_sums
from rotationzoo.linalg.moments import Moment
from rotationzoo.model.capture import capture
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS

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


def test_a_rotation_costs_what_the_definition_costs(as_on_a_gpu):
    """On activations of the demo model: eigenvalues, and the error of scores after 2-bit keys."""
    options = Namespace(data="bundled", tokens=2048, length=512)
    loaded = load_chosen("demo", options, torch.bfloat16)
    model, geometry, batches = loaded.model, loaded.geometry, loaded.batches(2)
    # torch's own attention in bfloat16 ends with an error where ATen is told of fewer instructions
    # than a processor with AMX has.
    model.set_attn_implementation("eager")
    keys = {}
    with torch.no_grad(), capture(model, lambda layer, query, key, *_: keys.update({layer: key})):
        model(batches[0], use_cache=False)
    expected = collect(model, geometry, batches, Recipe())
    wanted = fit(expected, Recipe(), geometry)
    as_on_a_gpu()
    fast = collect(model, geometry, batches, Recipe())
    rotations = fit(fast, Recipe(), geometry)
    for layer, moments in expected.items():
        for kind, moment in moments.items():
            eigenvalues = torch.linalg.eigvalsh(moment.second_moment)
            error = torch.linalg.eigvalsh(fast[layer][kind].second_moment) / eigenvalues - 1
            assert error.abs().max() < 1e-4  # measured 3e-6
        metric = moments["query"].second_moment
        codes, costs = [], []
        for sides in (wanted[layer], rotations[layer]):
            matrix = sides.key.matrix.double()
            rotated = keys[layer][0].double() @ matrix
            stored = int2.quantize(rotated)
            noise = (int2.dequantize(stored) - rotated) @ matrix.mT
            codes.append(stored.codes)
            costs.append(((noise @ metric) * noise).sum(-1))
        # A code that is nearly a half may become the other one, for more or for less.
        same = (codes[0] == codes[1]).all(-1)
        assert same.double().mean() > 0.95
        assert abs(costs[1][same].sum() / costs[0][same].sum() - 1) < 1e-4  # measured 2e-7
