"""Choosing and learning rotations: the gradient through the codec, what candidates are scored on, and how one is chosen."""

import math
import time

import architectures
import pytest
import torch

from rotationzoo import int2
from rotationzoo import search as searching
from rotationzoo.calibrate import calibrate
from rotationzoo.candidates import bases, candidates
from rotationzoo.collect import collect
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluate import attention_modules
from rotationzoo.fit import fit
from rotationzoo.geometry import cached_layers, geometry_of
from rotationzoo.moments import Moment
from rotationzoo.plan import Job
from rotationzoo.recipe import PRESETS, Data, Search
from rotationzoo.refine import learn, straight_through
from rotationzoo.rotation import data_free, orthogonality_error
from rotationzoo.sample import output_projections, take
from rotationzoo.search import _clearly_less, search, shared_clip
from rotationzoo.simulate import Arm, Cache, Simulation
from rotationzoo.verify import verify

FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "gemma4"]  # plain, norms, windows, soft cap, sinks, shared caches
CACHE = Cache(sink=2, recent=4)
ROWS = list(torch.randint(3, 59, (6, 40), generator=torch.Generator().manual_seed(1)))


def samples_of(model, queries: int = 8, rows=ROWS):
    geometry = geometry_of(model)
    owned = {layer.index for layer in cached_layers(geometry)}
    return geometry, take(model, geometry, rows, CACHE, queries, owned, output_projections(model, geometry))


# ---- the gradient


@pytest.mark.parametrize("form", int2.FORMATS)
@pytest.mark.parametrize("group", [None, 8])
def test_the_straight_through_codec_is_the_codec(form, group):
    rows = torch.randn(2, 3, 16, 32, generator=torch.Generator().manual_seed(0)) * 3
    clip = torch.tensor([[0.9], [0.7], [1.0]], dtype=torch.float64)
    rows.requires_grad_()
    found = straight_through(rows, clip, group, int2.FORMATS[form])
    assert torch.equal(found, int2.round_trip(rows.detach(), clip, group, int2.FORMATS[form]))
    # Rows twice as large come back twice as large, so the derivative along the rows is what comes back.
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((found * weights).sum(), rows)
    allowed = 1e-6 if form == "sglang" else 1e-3  # of float16 metadata, whose rounding the gradient does not know
    assert abs((gradient * rows - weights * found).sum()) < allowed * (weights * found).abs().sum()


def test_learning_turns_towards_what_is_stored_better():
    """Rows in which one channel towers: turned so that it is spread, they come back far better."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 2, 256, 16, generator=generator)
    rows[..., 0] = 40 * rows[..., 0].sign()
    start = torch.eye(16).expand(2, -1, -1).contiguous()
    clip = torch.ones(2, 1, dtype=torch.float64)

    def loss(sample: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        back = straight_through(sample @ matrix, clip, None, int2.SGLANG) @ matrix.mT
        return (back - sample).square().mean((0, 2, 3))

    learned, curve = learn([rows], start, loss, steps=80, rate=0.02)
    assert len(curve) == 80
    assert loss(rows, learned).sum() < 0.5 * loss(rows, start).sum()
    assert orthogonality_error(learned) < 1e-6
    again, _ = learn([rows], start, loss, steps=80, rate=0.02)
    assert torch.equal(again, learned), "the same seed, the same rotation"
    late, none = learn([rows], start, loss, steps=80, rate=0.02, deadline=time.monotonic() - 1)
    assert not none
    assert torch.allclose(late, start, atol=1e-6)


# ---- what is scored


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_read_what_the_simulated_cache_reads(name):
    """The KL of sampled queries is that of the simulation, with the model's own windows, soft cap and sinks."""
    model = architectures.build(name)
    geometry, samples = samples_of(model, queries=100)  # all that there are
    arm = Arm("random", fit(None, PRESETS["random"], geometry))
    positions = torch.arange(CACHE.first_quantized, 40)
    seen: dict[int, torch.Tensor] = {}
    simulation = Simulation(arm, CACHE, geometry, {layer.index for layer in geometry}, queries=positions)
    ids = ROWS[0][None]
    first = min(layer.index for layer in geometry)
    with (
        torch.no_grad(),
        simulation.running(
            model, attention_modules(model, ids[:, :8]), lambda *_: None, lambda layer, kl, _: seen.update({layer: kl})
        ),
    ):
        model(input_ids=ids, use_cache=False)
    sample = samples[first][0]
    stored = arm.stored(sample.key, f"layers.{first}.key", CACHE.format)
    attention, part = sample.attention(stored)
    assert attention.shape == part.shape == sample.exact.shape
    p, q = (torch.cat([t, 1 - t.sum(-1, keepdim=True)], -1).double().clamp(min=1e-30) for t in (sample.exact, attention))
    plain = (p * (p / q).log()).sum(-1).mean()
    assert math.isclose(plain.item(), seen[first].mean().item(), rel_tol=2e-3, abs_tol=1e-7)
    weight = (sample.exact * (sample.attend.mask[..., 40:] > -1)).norm(dim=-1)
    weighted = ((p * (p / q).log()).sum(-1) * weight).sum() / weight.sum()
    heads = sample.divergence(attention)
    assert heads.min() - 1e-6 <= weighted <= heads.max() * 1.05 + 1e-6
    assert sample.divergence(sample.attention(sample.key)[0]).max() < 1e-6, "exact keys cost nothing"
    assert sample.error(sample.value, part).max() == 0, "nor do exact values"


def test_a_cache_that_layers_share_is_scored_by_all_of_them():
    model = architectures.build("gemma4")
    geometry, samples = samples_of(model)
    readers = {owner: sum(layer.owner == owner for layer in geometry) for owner in samples}
    assert {owner: len(found) for owner, found in samples.items()} == {o: n * len(ROWS) for o, n in readers.items()}
    assert max(readers.values()) > 1


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_the_output_projection_is_found_by_what_runs(name):
    model = architectures.build(name)
    geometry = geometry_of(model)
    found = output_projections(model, geometry)
    assert set(found) == {layer.index for layer in geometry}
    for layer in geometry:
        weight = model.get_decoder().layers[layer.index].self_attn.o_proj.weight
        assert torch.equal(found[layer.index].flatten(0, 1).T, weight)


def test_errors_of_values_are_those_of_the_block():
    """A change of all values of one KV head, through its query heads and the output projection."""
    model = architectures.build("llama")
    _, samples = samples_of(model)
    sample = samples[1][0]
    changed = sample.value.clone()
    changed[:, 1] += torch.randn(changed[:, 1].shape, generator=torch.Generator().manual_seed(0))
    weight = model.model.layers[1].self_attn.o_proj.weight

    def block(values: torch.Tensor) -> torch.Tensor:
        heads = torch.einsum("hgqt,htd->qhgd", sample.exact[0].unflatten(0, (2, 2)), values[0])
        return heads.flatten(1) @ weight.T

    expected = (block(changed) - block(sample.value)).square().sum() / block(sample.value).square().sum()
    found = sample.error(changed, sample.exact)
    assert found[0] == 0
    assert math.isclose(found[1].item(), expected.item(), rel_tol=1e-4)


# ---- candidates and choices


def test_candidates_are_what_they_are_called():
    rows = torch.randn(2, 500, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    moments = {}
    for kind in ("query", "key"):
        moments[kind] = Moment.zeros(2, 16)
        moments[kind].add(rows if kind == "key" else rows.flip(-1))
    found = bases(moments, "key")
    centred = rows - rows.mean(1, keepdim=True)
    assert torch.allclose(found["key covariance"], centred.mT @ centred / 500, atol=1e-10)
    made = candidates(moments, "key", "r_h_pbr", None)
    assert list(made) == ["query", "key", "key covariance", "hadamard"]
    assert torch.equal(made["hadamard"][1], data_free(16, "hadamard", 0))
    assert max(orthogonality_error(matrix) for matrix in made.values()) < 1e-12


def test_better_means_by_more_than_a_standard_error():
    before = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    after = torch.tensor([[0.9, 0.5, 1.0], [0.9, 1.6, 1.0], [0.8, 1.1, 1.0], [0.9, 0.7, 1.0]])
    assert _clearly_less(after, before).tolist() == [True, False, False]
    assert _clearly_less(after[:1], before[:1]).tolist() == [True, True, False], "one text has no error to show"


@pytest.fixture(scope="module")
def searched():
    model = architectures.build("llama", head_dim=32)
    geometry = geometry_of(model)
    recipe = PRESETS["best"].model_copy(update={"sink": 2, "recent": 4, "search": Search(steps=3, queries=8)})
    statistics = collect(model, geometry, [torch.stack(ROWS[:4])], recipe)
    return model, geometry, statistics, recipe


def test_a_search_chooses_for_every_head(searched):
    model, geometry, statistics, recipe = searched
    tensors, record = search(model, geometry, statistics, ROWS[:4], ROWS[4:], recipe)
    base = fit(statistics, recipe, geometry)
    assert {name for name in base if name.endswith((".rotation", ".clip"))} == set(tensors)
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (base[name].shape, base[name].dtype)
        if name.endswith(".rotation"):
            assert orthogonality_error(tensor) < 1e-6
        else:
            assert ((tensor > 0) & (tensor <= 1)).all()
    for layer in record.values():
        for side in ("key", "value"):
            assert all(chosen <= own for chosen, own in zip(layer[side]["chosen"], layer[side]["own"], strict=True))
    pairs = [p for layer in record.values() for p in zip(layer["key"]["chosen"], layer["key"]["own"], strict=True)]
    assert sum(chosen < own for chosen, own in pairs) >= len(pairs) / 2
    assert shared_clip(record, "key") in searching.COARSE
    again, _ = search(model, geometry, statistics, ROWS[:4], ROWS[4:], recipe)
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)


def test_choices_are_made_on_text_that_nothing_was_fitted_to(searched, monkeypatch):
    model, geometry, statistics, recipe = searched
    asked = []

    def spy(model, geometry, rows, *rest, **options):
        rows = list(rows)
        asked.append((options["seed"], [row.tolist() for row in rows]))
        return take(model, geometry, rows, *rest, **options)

    monkeypatch.setattr(searching, "take", spy)
    search(model, geometry, statistics, ROWS[:4], ROWS[4:], recipe)
    assert asked == [(1, [row.tolist() for row in ROWS[4:]]), (2, [row.tolist() for row in ROWS[:4]])]


def test_layers_that_do_not_fit_in_memory_together_give_the_same(searched, monkeypatch):
    model, geometry, statistics, recipe = searched
    whole, _ = search(model, geometry, statistics, ROWS[:4], ROWS[4:], recipe)
    monkeypatch.setattr(searching, "_BYTES", 1.0)
    parts, _ = search(model, geometry, statistics, ROWS[:4], ROWS[4:], recipe)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_nothing_better_keeps_what_the_recipe_says(searched, monkeypatch):
    model, geometry, statistics, recipe = searched
    monkeypatch.setattr(searching, "_clearly_less", lambda after, before: torch.zeros(after.shape[1], dtype=torch.bool))
    tensors, record = search(model, geometry, statistics, ROWS[:4], ROWS[4:], recipe)
    base = fit(statistics, recipe, geometry)
    assert all(torch.equal(tensor, base[name]) for name, tensor in tensors.items())
    assert record["0"]["key"]["candidate"] == ["query", "query"]


# ---- the job


def test_best_makes_an_artifact_that_is_better_on_the_demo_model(tmp_path):
    recipe = PRESETS["best"].model_copy(update={"data": Data(tokens=3072, length=512), "search": Search(steps=4, queries=8)})
    there = calibrate(Job("demo", recipe, tmp_path / "best", device="cpu"))
    assert verify(there, "demo").ok, verify(there, "demo").problems
    found = there.manifest["search"]
    assert set(found["shared_clip"]) == {"key", "value"}
    own, chosen = (sum(sum(layer["key"][name]) for layer in found["layers"].values()) for name in ("own", "chosen"))
    assert chosen < 0.9 * own  # measured 0.7
    assert "layers.0.key.mean" in there.rotations()
    tensors = there.rotations()
    again = calibrate(Job("demo", recipe, tmp_path / "again", device="cpu"))
    assert again.identity == there.identity, "the same bytes"
    assert not (tmp_path / "best.checkpoint.safetensors").exists()
    assert tensors["layers.0.key.clip"].unique().numel() >= 1
    kept = calibrate(Job("demo", recipe, tmp_path / "none", device="cpu", budget=0.0))
    assert not any(layer["key"].get("learned") for layer in kept.manifest["search"]["layers"].values()), "no time to learn"


def test_a_budget_is_for_recipes_that_search(inside):
    result = inside("calibrate", "demo", "--recipe", "oscar", "--budget", "5")
    assert result.returncode == 2
    assert "--recipe best" in result.stderr


def test_too_little_text_to_choose_on(tmp_path):
    recipe = PRESETS["best"].model_copy(update={"data": Data(tokens=1024, length=512)})
    with pytest.raises(RotationZooError, match="2 rows are too few"):
        calibrate(Job("demo", recipe, tmp_path / "out", device="cpu"))
    recipe = PRESETS["best"].model_copy(update={"data": Data(tokens=1024, length=256)})
    with pytest.raises(RotationZooError, match="no held-out row is longer than 320 tokens"):
        calibrate(Job("demo", recipe, tmp_path / "out", device="cpu"))
