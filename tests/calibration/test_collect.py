"""The captured statistics against a direct computation from the layers' own weights, and their sums
while a calibration is under way."""

import dataclasses

import pytest
import torch
from support import architectures
from support.direct_statistics import largest_difference
from support.models import attention_calls

from rotationzoo.artifact.fit import fit, target_moment
from rotationzoo.calibration import checkpoint as checkpoints
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.collect import collect
from rotationzoo.errors import RotationZooError, Unsound, UnsupportedModel
from rotationzoo.linalg.compositions import hadamard, permutation
from rotationzoo.model import prediction
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS

BATCHES = list(torch.randint(3, 59, (3, 2, 32), generator=torch.Generator().manual_seed(2)))
SDPA = 1e-9  # measured 4e-16
OWN_FLOAT32_SOFTMAX = 1e-6  # measured 2e-8; eager attention computes its softmax in float32
FLOAT32 = 1e-5  # measured 7e-8


@pytest.mark.parametrize(
    ("name", "changes", "dtype", "tolerance"),
    [
        pytest.param("qwen3", dict(num_key_value_heads=4), torch.float64, SDPA, id="MHA"),
        pytest.param("qwen3", dict(num_key_value_heads=2), torch.float64, SDPA, id="GQA"),
        pytest.param("qwen3", dict(num_key_value_heads=1), torch.float64, SDPA, id="MQA"),
        pytest.param("mistral", dict(), torch.float64, SDPA, id="window"),
        pytest.param("gemma2", dict(), torch.float64, OWN_FLOAT32_SOFTMAX, id="soft cap"),
        *((name, {}, torch.float32, FLOAT32) for name in ("qwen3", "mistral", "gemma2", "gpt_oss")),
    ],
)
def test_statistics_are_those_of_a_direct_computation(name, changes, dtype, tolerance):
    model = architectures.build(name, **changes).to(dtype)
    errors = largest_difference(model, BATCHES, sink=4)
    assert len(errors) == 6
    assert max(errors.values()) < tolerance, errors


def test_layers_that_share_a_cache_count_for_its_owner():
    model = architectures.build("gemma4")
    geometry = geometry_of(model)
    assert [layer.owner for layer in geometry] == [0, 1, 0, 1]
    statistics = collect(model, geometry, BATCHES, Recipe(sink=4))
    assert set(statistics) == {0, 1}
    tokens = sum(batch.numel() for batch in BATCHES)
    for kinds in statistics.values():  # two layers, two query heads per KV head
        assert kinds["query"].weight.tolist() == [2 * 2 * tokens] * 2
        assert kinds["key"].weight.tolist() == [tokens * 28 / 32] * 2


def test_sums_that_are_not_finite_are_an_error_where_the_output_is(monkeypatch):
    """A key of minus infinity may not show in the output of the model."""
    model = architectures.build("qwen3")
    model.model.layers[2].self_attn.v_proj.weight.data[3, 5] = float("nan")
    monkeypatch.setattr(prediction, "check_finite", lambda *_: None)
    with pytest.raises(Unsound, match="layer 2 has output activations that are not finite"):
        collect(model, geometry_of(model), BATCHES, Recipe(sink=4))


def test_a_layer_that_the_hooks_miss_is_an_error():
    model = architectures.build("qwen3")
    geometry = geometry_of(model)
    phantom = dataclasses.replace(geometry[0], index=9, owner=9)
    with pytest.raises(UnsupportedModel, match="saw 0 query rows of layer 9 instead of 384"):
        collect(model, [*geometry, phantom], BATCHES, Recipe(sink=4))
    with pytest.raises(UnsupportedModel, match="layer 3 calls attention although"):
        collect(model, geometry[:3], BATCHES, Recipe(sink=4))


def test_rows_within_the_sink_are_refused():
    model = architectures.build("qwen3")
    with pytest.raises(RotationZooError, match="sink"):
        collect(model, geometry_of(model), BATCHES, Recipe(sink=32))


# ---- the published recipe: V1 files are pooled over KV heads, with value weights from key energy


def published(queries, keys, values):
    """Moments of one layer as the published code forms them; `[T, H, D]` each, float64."""
    kv_heads = keys.shape[1]
    group = queries.shape[1] // kv_heads
    sigma_k, sigma_v = 0, 0
    for head in range(kv_heads):
        q = queries[:, head * group : (head + 1) * group].reshape(-1, queries.shape[-1])
        k, v = keys[:, head], values[:, head]
        energy = torch.einsum("td,de,te->t", k, q.T @ q / len(q), k)
        weights = energy / energy.sum() * len(k)
        sigma_k = sigma_k + q.T @ q / len(q) / kv_heads
        sigma_v = sigma_v + torch.einsum("td,t,te->de", v, weights, v) / len(k) / kv_heads
    return sigma_k, sigma_v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_oscar_v1_reproduces_the_published_formulas(kv_heads):
    model = architectures.build("qwen3", num_key_value_heads=kv_heads).double()
    recipe, geometry = PRESETS["oscar-v1"], geometry_of(model)
    statistics = collect(model, geometry, BATCHES, recipe)
    rotations = fit(statistics, recipe, geometry)
    for layer, calls in attention_calls(model, BATCHES).items():
        rows = [torch.cat(parts, dim=0) for parts in zip(*calls, strict=True)]
        queries, keys, values, _ = (each.transpose(1, 2).flatten(0, 1) for each in rows)
        expected = published(queries, keys, values)
        for side, sigma in zip(("key", "value"), expected, strict=True):
            found = target_moment(statistics[layer], recipe, side)[0]
            assert (found - sigma).norm() / sigma.norm() < 1e-10  # measured 5e-16
            rotation = rotations[layer][side].matrix
            assert rotation.shape == (1, 16, 16)
            basis = rotation[0].double() @ (hadamard(16) @ permutation(16)).T
            reference = torch.linalg.eigh(sigma).eigenvectors
            signs = (basis * reference).sum(0).sign()
            assert (basis - reference * signs).abs().max() < 1e-5  # float32 storage; measured 2e-8


# ---- running sums: added as on a GPU, stopped in the middle of a batch, saved now and then


WINDOWED = Recipe(sink=4, recent=6)


def differences(statistics, expected):
    """The relative differences of all second moments, means and weights."""
    for layer, moments in expected.items():
        for kind, wanted in moments.items():
            moment = statistics[layer][kind]
            for name in ("second_moment", "mean", "weight"):
                value, exact = getattr(moment, name), getattr(wanted, name)
                yield ((value - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "mimo_v2_flash"])
@pytest.mark.parametrize("recipe", ["oscar-v1", "oscar"])
def test_runs_of_whole_batches_give_the_definition(name, recipe, monkeypatch):
    """As on a GPU, where rows of 16 bits are added in runs."""
    model = architectures.build(name).to(torch.bfloat16)
    geometry = geometry_of(model)
    chosen = PRESETS[recipe].model_copy(update={"sink": 4, "recent": 6})
    expected = collect(model, geometry, BATCHES, chosen)
    as_on_a_gpu = lambda rows: rows.dtype == torch.bfloat16  # noqa: E731
    monkeypatch.setattr(f"{collect.__module__}.on_tensor_cores", as_on_a_gpu)
    statistics = collect(model, geometry, BATCHES, chosen)
    largest = max(differences(statistics, expected))
    assert 0 < largest < 1e-6  # measured 2e-7


def test_ctrl_c_in_the_middle_of_a_batch_saves_the_batches_before(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_SPEED", 1.0)  # so that nothing is saved in between
    model = architectures.build("qwen3")
    geometry = geometry_of(model)
    expected = collect(model, geometry, BATCHES, WINDOWED)
    path, left, steps = tmp_path / "sums.safetensors", iter(range(2, -1, -1)), []

    def stop(*_):
        if next(left) == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), model.model.layers[2].register_forward_hook(stop):
        collect(model, geometry, BATCHES, WINDOWED, Checkpoint(path, {}))
    note = lambda stage, done, total: steps.append(done)  # noqa: E731
    statistics = collect(model, geometry, BATCHES, WINDOWED, Checkpoint(path, {}), note)
    # Tokens: two batches were saved, and each of four layers is a step of the third.
    assert steps == [128, 144, 160, 176, 192, 192]
    assert max(differences(statistics, expected)) == 0
