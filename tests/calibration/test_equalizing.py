"""Recipes that equalize: what is fitted, stored, made again, resumed, merged and refused."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import architectures
from support.architectures import EQUALIZED, families
from support.equalizers import statistics_of, traced_geometry
from support.jobs import SMALL, interrupt_after, job, rotation_bytes
from support.models import save_family, save_tiny

from rotationzoo.artifact.layout import rotation_tensors
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration import plan as plans
from rotationzoo.calibration.claim import Claim
from rotationzoo.calibration.equalizing import equalize, stored_equalizers
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import plan
from rotationzoo.calibration.soundness import check
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.linalg.compositions import eigenbasis
from rotationzoo.linalg.moments import sums
from rotationzoo.model import loading
from rotationzoo.model.capture import decoder, intercept
from rotationzoo.model.geometry import cached_layers, geometry_on_meta
from rotationzoo.model.key_scales import find_key_scales
from rotationzoo.recipe import PRESETS, Recipe, equalized

RECIPE = equalized(Recipe(data=SMALL, center_keys=True))
IDS = torch.randint(3, 59, (4, 32), generator=torch.Generator().manual_seed(0))


def measure(model, batches, recipe):
    """The geometry of a model in memory, and the statistics that a job would collect."""
    geometry = traced_geometry(model.config)
    return geometry, statistics_of(model, geometry, batches, recipe)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The folder of a tiny model, with channels of keys that tower over the others."""
    folder = save_tiny(tmp_path_factory.mktemp("models") / "wide")
    weights = load_file(folder / "model.safetensors")
    for layer in (0, 1):
        weights[f"model.layers.{layer}.self_attn.k_norm.weight"][[3, 11, 6, 14]] *= 20.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def made(wide, tmp_path_factory) -> Artifact:
    """An equalized artifact of that model, which no test may change."""
    return calibrate(job(wide, tmp_path_factory.mktemp("equalized"), RECIPE))


@families(EQUALIZED)
@torch.no_grad()
def test_equalized_attention_is_the_models_own_in_float64(name):
    """Its own function, with windows, soft caps and sinks, of scaled keys, divided queries and
    transformed values; outputs are transformed back."""
    model = architectures.build(name)
    recipe = RECIPE.model_copy(update={"sink": 4, "center_keys": False})
    geometry, statistics = measure(model, [IDS], recipe)
    for moments in statistics.values():
        wide = torch.linspace(-4, 4, moments["key"].first.shape[1]).exp()
        moments["key"] = moments["key"].transformed(torch.diag(wide))
    equalizers = equalize(statistics, recipe, geometry)
    layers = {layer.index: layer for layer in geometry}
    errors, ranges = [], []

    def compare(index, query, key, value, attend):
        equalizer = equalizers[layers[index].owner]
        factors, matrix = equalizer.key.double(), equalizer.value.double()
        by_query = factors.repeat_interleave(layers[index].group, 0)[:, None]
        undo = torch.linalg.inv(matrix).repeat_interleave(layers[index].group, 0)
        query, key, value = query.double(), key.double(), value.double()
        expected = attend(query, key, value)
        output = attend(query / by_query, key * factors[:, None], value @ matrix)
        output = (output.transpose(1, 2) @ undo).transpose(1, 2)
        errors.append((output - expected).abs().max() / expected.abs().max())
        ranges.append(factors.max() / factors.min())
        return expected.float()

    with intercept(model, compare):
        decoder(model)(input_ids=IDS, use_cache=False)
    assert max(errors) < 1e-12  # 1e-15 was measured
    assert min(ranges) >= 4


def test_both_sides_have_the_same_energy_in_the_folded_frame():
    """Of the statistics as they are folded for the fit, on a model with wide channels of keys."""
    model = architectures.build("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[[3, 11]] *= 30.0
    recipe = RECIPE.model_copy(update={"sink": 4})
    geometry, statistics = measure(model, [IDS], recipe)
    equalizers = equalize(statistics, recipe, geometry)[0]
    assert equalizers.key[0, 3] == equalizers.key[0, 11]
    assert equalizers.key[0, 3] < equalizers.key[0].median() / 2
    folded = equalizers.fold(statistics[0])
    energies = folded["key"].covariance.diagonal(dim1=1, dim2=2)
    queries = folded["query"].second_moment.diagonal(dim1=1, dim2=2)
    pairs = [side.view(2, 2, 8).sum(1) for side in (energies, queries)]
    octaves = (pairs[0] / pairs[1]).log2()  # up to a number for each head, and rounding
    assert (octaves.amax(1) - octaves.amin(1) <= 4).all()
    stored, read = folded["value"].second_moment, folded["projection"].second_moment
    stored, read = (side / side.norm(dim=(1, 2), keepdim=True) for side in (stored, read))
    assert (stored - read).norm(dim=(1, 2)).max() < 1e-6  # 1e-7 was measured: A is float32


def test_rotations_are_fitted_in_the_folded_frame_and_means_are_not_folded(made):
    statistics = made.statistics
    plain = RECIPE.model_copy(update={"equalize": False})
    unfolded = fit(sums(statistics), plain, made.geometry)
    for layer, equalizers in stored_equalizers(made.rotations).items():
        folded = equalizers.fold(sums(statistics)[layer])
        eigenvalues, _ = eigenbasis(folded["query"].second_moment)
        key = made.rotations[layer].key
        assert torch.allclose(key.eigenvalues.double(), eigenvalues, rtol=1e-5)
        assert not torch.allclose(key.matrix, unfolded[layer].key.matrix, atol=1e-3)
        assert torch.equal(key.mean, statistics[layer]["key"].mean.float())


def test_an_artifact_with_equalizers_round_trips_and_verifies(made):
    verification = verify(made)
    assert verification.problems == []
    assert "equalizers" in verification.checked
    assert made.content["equalization"] == {"weights": "published"}
    assert made.recipe.name == "oscar-equalized"
    assert made.rotations.equalized
    for layer in cached_layers(made.geometry):
        assert (layer.rope_pairs, layer.rope_distance, layer.shared_norm) == (8, 8, True)
        sides = made.rotations[layer.index]
        assert sides.key.equalizer.shape == (2, 16)
        assert sides.value.equalizer.shape == (2, 16, 16)
    card = (made.folder / "README.md").read_text()
    assert "These rotations are equalized" in card
    assert "    rotationzoo export FOLDER --to sglang --folded FOLDED " in card


def test_equalizers_are_made_again_from_the_statistics_alone(made):
    again = [fit(sums(made.statistics), made.recipe, made.geometry) for _ in range(2)]
    tensors, others = (rotation_tensors(rotations) for rotations in again)
    for name, tensor in rotation_tensors(made.rotations).items():
        assert torch.equal(tensors[name], others[name])
        if name.endswith("key.equalizer"):
            assert torch.equal(tensors[name], tensor)
        else:
            assert torch.allclose(tensors[name], tensor, atol=1e-5), name  # 0 was measured


def test_an_interrupted_job_goes_on_to_the_same_bytes(made, wide, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        calibrate(job(wide, tmp_path, RECIPE), interrupt_after(1))
    resumed = calibrate(job(wide, tmp_path, RECIPE))
    assert rotation_bytes(resumed) == rotation_bytes(made)


def test_statistics_of_two_shards_merge():
    model, recipe = architectures.build("qwen3"), RECIPE.model_copy(update={"sink": 4})
    geometry, whole = measure(model, [IDS], recipe)
    shards = [measure(model, [part], recipe)[1] for part in (IDS[:1], IDS[1:])]
    merged = {
        layer: {kind: moments[kind] + shards[1][layer][kind] for kind in moments}
        for layer, moments in shards[0].items()
    }
    expected, equalizers = equalize(whole, recipe, geometry), equalize(merged, recipe, geometry)
    for layer in expected:
        assert torch.equal(expected[layer].key, equalizers[layer].key)
        assert torch.allclose(expected[layer].value, equalizers[layer].value, atol=1e-6)


def test_readers_of_a_shared_cache_add_their_projections():
    """Gemma 4: layers 2 and 3 read the caches of 0 and 1."""
    model, recipe = architectures.build("gemma4"), RECIPE.model_copy(update={"sink": 4})
    _, statistics = measure(model, [IDS], recipe)
    assert statistics[0]["projection"].weight.tolist() == [2 * 2 * 64] * 2
    weights = [model.model.layers[index].self_attn.o_proj.weight for index in (0, 2)]
    blocks = [weight.double().view(64, 2, 2, 16) for weight in weights]
    expected = sum(torch.einsum("nhgd,nhge->hde", block, block) for block in blocks)
    assert torch.allclose(statistics[0]["projection"].second, expected)


DAMAGE = {
    "key equalizer not positive": lambda key, value: (-key, value),
    "key equalizer not made of powers of two": lambda key, value: (1.5 * key, value),
    "key equalizer differs between channels that share a factor": lambda key, value: (
        key * 2.0 ** torch.eye(16)[:1],
        value,
    ),
    "key equalizer differs between": lambda key, value: (  # heads, which share a norm here
        key * torch.tensor([[1.0], [2.0]]),
        value,
    ),
    "value equalizer of a condition number": lambda key, value: (
        key,
        value * (torch.arange(16) > 0),
    ),
    "equalizers that do not come from the stored statistics": lambda key, value: (
        key,
        value.flip(0),
    ),
    "key equalizer not finite": lambda key, value: (key * float("nan"), value),
    "key equalizer of another shape": lambda key, value: (key[:1], value),
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_a_damaged_equalizer_is_refused(made, problem):
    def damage(layer, side, rotation):
        if layer != 1:
            return rotation
        sides = made.rotations[layer]
        changed = DAMAGE[problem](sides.key.equalizer, sides.value.equalizer)
        return replace(rotation, equalizer=changed[side == "value"])

    problems = check(made.rotations.replace(damage), made.statistics, made.content).problems
    assert [words for words in problems if problem in words and words.endswith("layer 1")]


def test_missing_equalizers_pairs_and_projections_are_found(made):
    content, rotations, statistics = made.content, made.rotations, made.statistics
    without = rotations.replace(lambda layer, side, rotation: replace(rotation, equalizer=None))
    assert "key equalizer missing: layers 0, 1" in check(without, statistics, content).problems
    recipe = content["recipe"] | {"equalize": False}
    extra = check(rotations, statistics, content | {"recipe": recipe}).problems
    assert any("tensors that belong to no layer: layers.0.key.equalizer" in one for one in extra)
    geometry = [replace(layer, rope_pairs=None) for layer in made.geometry]
    (problem,) = Claim(RECIPE, geometry).equalizer_problems(rotations, None)
    assert "does not say which key channels share a factor" in problem
    geometry = [replace(layer, fixed_values=True) for layer in made.geometry]
    (problem,) = Claim(RECIPE, geometry).equalizer_problems(rotations, None)
    assert "that no weights of the model can carry" in problem
    fewer = {layer: dict(kinds) for layer, kinds in sums(statistics).items()}
    del fewer[1]["projection"]
    with pytest.raises(RotationZooError, match="layer 1 has no statistics to equalize with"):
        fit(fewer, RECIPE, made.geometry)


def test_a_model_that_cannot_carry_equalizers_is_refused_from_its_config(tmp_path):
    folder = save_family("llama4", tmp_path / "llama4", weights=False)
    refusal = plan(job(folder, tmp_path, RECIPE)).refusal
    assert isinstance(refusal, UnsupportedModel)
    assert "keys that cannot be scaled exactly" in str(refusal)
    assert "--equalize" in refusal.hint
    plain = RECIPE.model_copy(update={"equalize": False})
    assert plan(job(folder, tmp_path, plain)).refusal is None


def test_a_model_that_only_runs_with_its_weights_is_refused(wide, tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "geometry_on_meta", lambda model: None)
    refusal = plan(job(wide, tmp_path, RECIPE)).refusal
    assert isinstance(refusal, UnsupportedModel)
    assert "does not run without weights, so it cannot be traced" in str(refusal)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4", "doge"])
def test_keys_alone_are_equalized_where_no_weights_can_transform_values(family, tmp_path):
    """A gate after attention, a norm of values, and values that decide the mask."""
    per_layer = {"vocab_size_per_layer_input": 2048} if family == "gemma4" else {}
    folder = save_family(family, tmp_path / family, **per_layer)
    recipe = RECIPE.model_copy(update={"center_keys": False})
    artifact = calibrate(job(folder, tmp_path, recipe))
    assert verify(artifact).problems == []
    assert any(note.startswith("only keys are equalized") for note in artifact.manifest.notes)
    for equalizers in stored_equalizers(artifact.rotations).values():
        assert torch.equal(equalizers.value, torch.eye(len(equalizers.value[0])).expand(2, -1, -1))
    meta = loading.on_meta(architectures.config(family, vocab_size=2048), family)
    scales = find_key_scales(meta, geometry_on_meta(meta), family)
    factors = {layer: sides.key.equalizer for layer, sides in artifact.rotations.items()}
    scales.scalings(factors)  # raises where the weights cannot carry them


def test_offloaded_weights_are_read_like_others(made, wide, tmp_path):
    """accelerate keeps them on disk until their module runs."""
    spread = job(wide, tmp_path, RECIPE, device_map="auto", max_memory="cpu=300KB")
    equalizers = stored_equalizers(calibrate(spread).rotations)
    for layer, expected in stored_equalizers(made.rotations).items():
        assert torch.equal(equalizers[layer].key, expected.key)
        assert torch.allclose(equalizers[layer].value, expected.value, atol=1e-6)


def test_data_free_rotations_can_be_equalized(wide, tmp_path):
    recipe = equalized(PRESETS["hadamard"].model_copy(update={"data": SMALL}))
    artifact = calibrate(job(wide, tmp_path, recipe))
    assert verify(artifact).ok
    assert artifact.recipe.name == "hadamard-equalized"
    key = artifact.rotations[0].key
    assert not torch.equal(key.transform, key.matrix.expand_as(key.transform))
