"""What is sampled, in how many passes, and where it lies."""

from dataclasses import replace

import accelerate
import pytest
import torch
from support import architectures
from support.searches import CACHE, FAMILIES, ROWS, stored_samples

from rotationzoo.calibration.search import shelf
from rotationzoo.calibration.search.draws import SamplingSettings
from rotationzoo.calibration.search.early_stop import run_decoder_until_stopped, stop_pass
from rotationzoo.calibration.search.sampling import take_samples
from rotationzoo.calibration.search.shelf import Shelf
from rotationzoo.model.capture import capture, intercept
from rotationzoo.model.geometry import cached_layers, geometry_of


def test_rows_to_learn_from_are_the_models_own():
    model = architectures.build("llama")
    seen = {}
    with (
        capture(
            model, lambda layer, query, key, value, output: seen.setdefault(layer, (key, value))
        ),
        torch.no_grad(),
    ):
        model(input_ids=ROWS[0][None])
    geometry = geometry_of(model)
    settings = SamplingSettings([], ROWS[:2], replace(CACHE, sink=4), queries=1)
    sampled = take_samples(model, geometry, geometry[1:2], settings, Shelf(0))
    assert set(sampled) == {1}
    for rows, whole in zip(sampled[1].rows, seen[1], strict=True):
        assert rows.shape[0] == 2 * 36
        assert torch.equal(rows[:36].transpose(0, 1), whole[0][:, 4:])
    few = take_samples(model, geometry, geometry[1:2], replace(settings, rows=10), Shelf(0))
    assert few[1].rows[0].shape[0] == 20


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_sample_what_single_texts_do(family):
    """Texts of two lengths, of which those of one length share a pass."""
    model = architectures.build(family)
    rows = [ROWS[0], ROWS[1][:30], ROWS[2], ROWS[3][:30]]
    geometry, single = stored_samples(model, rows=rows, fitted=rows)
    _, batched = stored_samples(model, rows=rows, fitted=rows, batch=3)
    assert set(single) == set(batched) == {layer.index for layer in cached_layers(geometry)}
    for layer, samples in single.items():
        for rows_of, others in zip(samples.rows, batched[layer].rows, strict=True):
            assert torch.allclose(rows_of, others, atol=1e-5)
        pairs = list(zip(samples.queries, batched[layer].queries, strict=True))
        assert [(one.text, one.layer) for one, _ in pairs] == sorted(
            (other.text, other.layer) for _, other in pairs
        )
        for one, other in pairs:
            assert torch.equal(one.mask, other.mask)
            for name in ("query", "key", "value"):
                assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-5)


def test_samples_are_in_the_dtype_of_the_model():
    model = architectures.build("llama").bfloat16()
    _, samples = stored_samples(model, fitted=ROWS[:1])
    sample = samples[0].queries[0]
    assert {sample.query.dtype, sample.key.dtype, samples[0].rows[1].dtype} == {torch.bfloat16}
    loaded = sample.load(None)
    assert loaded.key.dtype == torch.float32
    assert torch.equal(loaded.key.bfloat16(), sample.key)


def test_layers_that_do_not_fit_are_left_for_another_pass(monkeypatch):
    """Those that fit are the first, and the pass ends with the last of them."""
    model = architectures.build("gemma4")
    geometry, every = stored_samples(model, fitted=ROWS[:2])
    sizes = {}
    for layer, samples in every.items():
        parts = [
            *samples.rows,
            *(part for one in samples.queries for part in (one.query, one.key, one.value)),
        ]
        sizes[layer] = sum(part.nbytes for part in parts)
    owners = [layer.index for layer in cached_layers(geometry)]
    room = sizes[owners[0]] + sizes[owners[1]]
    monkeypatch.setattr(shelf, "free_memory", lambda device: room / shelf.HOST_SHARE)
    _, some = stored_samples(model, fitted=ROWS[:2])
    assert list(some) == owners[:2]
    monkeypatch.setattr(shelf, "free_memory", lambda device: 0)
    _, one = stored_samples(model, fitted=ROWS[:2])
    assert list(one) == owners[:1], "at least one"
    for layer in one:
        for sample, other in zip(one[layer].queries, every[layer].queries, strict=True):
            assert torch.equal(sample.key, other.key)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_pass_that_is_stopped_leaves_the_model_as_it_was(offloaded, tmp_path):
    model = architectures.build("gpt_oss")
    ids = ROWS[0][None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    if offloaded:
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    places = {name: part.device for name, part in model.named_parameters()}
    called = []

    def stop(layer, query, key, value, attend):
        called.append(layer)
        if layer == 1:
            stop_pass(attend.module)
        return attend(query, key, value)

    with intercept(model, stop), torch.no_grad():
        run_decoder_until_stopped(model, ids)
    assert called == [0, 1], "no layer after it"
    assert {name: part.device for name, part in model.named_parameters()} == places
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
