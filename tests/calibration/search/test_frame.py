"""A search in the folded frame judges the very changes that it would judge in the published one."""

from dataclasses import replace

import pytest
import torch
from support import architectures
from support.equalizers import traced_geometry
from support.searches import (
    FAMILIES,
    read_projections,
    samples_of,
    search_recipe,
    stored_samples,
    task_for,
)

from rotationzoo.cache.arm import Arm
from rotationzoo.calibration.equalizing import Equalizers, add_projections, stored_equalizers
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.search.frame import LayerData
from rotationzoo.calibration.search.layer import LayerSearch
from rotationzoo.calibration.search.layer_codec import LayerCodec
from rotationzoo.calibration.search.run import search_rotations
from rotationzoo.linalg.equalization import value_matrix
from rotationzoo.model.geometry import cached_layers


def random_equalizers(layer) -> Equalizers:
    generator = torch.Generator().manual_seed(layer.index)
    factors = 2.0 ** torch.randint(-2, 3, (layer.kv_heads, layer.key_dim), generator=generator)
    shape = layer.kv_heads, layer.value_dim, 2 * layer.value_dim
    rows = [torch.randn(shape, generator=generator) for _ in range(2)]
    value, metric = (side @ side.mT for side in rows)
    return Equalizers(factors, value_matrix(value, metric).float())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_scores_are_the_same_in_both_frames(family):
    """Of caches that make the same error, told in the frame of each."""
    model = architectures.build(family)
    geometry, stored = stored_samples(model)
    projections = read_projections(model, geometry)
    generator = torch.Generator().manual_seed(0)
    for layer in cached_layers(geometry):
        equalizers, of_layer = random_equalizers(layer), stored[layer.index]
        published = LayerData.fold({}, of_layer, projections, None).load_samples()
        of_readers = {one.layer: projections[one.layer] for one in of_layer.queries}
        folded = LayerData.fold({}, of_layer, of_readers, equalizers).load_samples()
        for sample, other in zip(published, folded, strict=True):
            key = sample.key + 0.3 * torch.randn(sample.key.shape, generator=generator)
            value = sample.value + 0.3 * torch.randn(sample.value.shape, generator=generator)
            attention, quantized = sample.attention(key)
            other_attention, other_quantized = other.attention(key * equalizers.key[:, None])
            # 6e-7 was measured, relative to the largest: the samples are float32.
            close = dict(rtol=1e-4, atol=1e-6)
            pairs = [
                (attention, other_attention),
                (sample.divergence(attention), other.divergence(other_attention)),
                (sample.key_error(attention), other.key_error(other_attention)),
                (
                    sample.value_error(quantized, value),
                    other.value_error(other_quantized, value @ equalizers.value),
                ),
            ]
            for score, in_frame in pairs:
                assert torch.allclose(score, in_frame, **close)
            assert not torch.allclose(sample.key, other.key)


def test_rows_to_learn_from_are_folded_like_those_of_the_samples(equalized_task):
    """And lose the mean of the folded rows, where the recipe centres them."""
    task = equalized_task
    (equalizers,) = stored_equalizers(task.baseline).values()
    _, stored = stored_samples(task.model)
    sample = stored[0].queries[0]
    stored[0].rows = sample.key[0].transpose(0, 1), sample.value[0].transpose(0, 1)
    data = LayerData.fold(task.statistics[0], stored[0], {}, equalizers)
    search = LayerSearch(task.geometry[0], data, task.recipe, task.baseline[0])
    (folded, *_) = data.load_samples()
    everything = torch.arange(sample.key.shape[2])
    keys, values = (search.rows(side).take(everything) for side in ("key", "value"))
    assert torch.equal(keys, search.codec.center_keys(folded).key[0])
    assert torch.equal(values, folded.value[0])
    assert not torch.allclose(values, sample.value[0])


@pytest.fixture(scope="module")
def equalized_task():
    """A search on a model of one layer, whose recipe equalizes and centres keys."""
    model = architectures.build("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[[3, 11]] *= 8.0
    recipe = search_recipe(steps=0)
    task = task_for(model, recipe)
    recipe = recipe.model_copy(update={"equalize": True})
    geometry = traced_geometry(model.config)
    add_projections(task.statistics, model, geometry)
    baseline = fit(task.statistics, recipe, geometry)
    return replace(task, geometry=geometry, recipe=recipe, baseline=baseline)


@torch.no_grad()
def test_a_folded_search_sees_the_errors_that_the_cache_makes(equalized_task):
    """What the codec of a search returns is what the arm of a simulation returns, in its frame."""
    task = equalized_task
    (equalizers,) = stored_equalizers(task.baseline).values()
    assert equalizers.key.max() > equalizers.key.min()
    sample = samples_of(task.model)[1][0][0]
    stored = stored_samples(task.model)[1][0]
    data = LayerData.fold(task.statistics[0], stored, {}, equalizers)
    codec = LayerCodec.from_recipe(task.recipe, data.moments, sample.key.device)
    arm = Arm("equalized", task.baseline)
    for side in ("key", "value"):
        folded = data.load_samples()[0]
        rows = codec.center_keys(folded).key if side == "key" else folded.value
        restored = codec.restore(side, rows, task.baseline[0][side].matrix[None])
        plain = sample.key if side == "key" else sample.value
        expected = arm.fake_quantize(plain, 0, side, codec.format)
        if side == "key":
            restored = restored / equalizers.key[:, None]
        else:
            restored = restored @ torch.linalg.inv(equalizers.value)
        # 3e-6 was measured: no code was so close to an edge that it rounded the other way.
        assert torch.allclose(restored, expected, atol=1e-4)
        assert not torch.allclose(expected, plain, atol=1e-2)


def test_a_search_keeps_the_equalizers(equalized_task):
    result = search_rotations(equalized_task)
    rotations, record = result.rotations, result.record
    for side in ("key", "value"):
        kept = equalized_task.baseline[0][side].equalizer
        assert torch.equal(rotations[0][side].equalizer, kept)
    assert record["layers"]["0"]["value"]["chosen"][0] <= 1.01
