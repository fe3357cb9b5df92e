"""The cache of a model with latents (MLA): their codes, and keys with RoPE that all stay exact."""

import pytest
import torch
from support import architectures

from rotationzoo.calibration.fit import fit
from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import PRESETS
from rotationzoo.runtime.cache import RotatedCache

IDS = torch.randint(3, 59, (3, 48), generator=torch.Generator().manual_seed(1))
SINK, RECENT = 4, 8


@pytest.fixture(scope="module")
def model():
    return architectures.build("deepseek_v3")


def cache_of(model):
    rotations = fit(None, PRESETS["random"], geometry_of(model))
    return RotatedCache(rotations, model, sink=SINK, recent=RECENT)


@torch.no_grad()
def read(model, cache, ids=IDS):
    return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


@pytest.fixture
def filled(model):
    cache = cache_of(model)
    read(model, cache)
    return cache


def test_it_holds_codes_of_latents_and_exact_keys(model, filled):
    """A latent has 20 elements and a key 8. The exact windows hold both; between them a latent
    takes 20 / 4 bytes and a float32 scale and offset."""
    stream = filled.layers[0].streams[0]
    assert list(stream.blocks) == ["latent"]
    quantized = IDS.shape[1] - SINK - RECENT
    assert stream.blocks["latent"].length == quantized
    assert stream.tail["latent"].shape == (3, 1, RECENT, 20)
    assert stream.head["latent"].shape == (3, 1, SINK, 20)
    assert stream.head["rope"].shape == (3, 1, SINK + quantized, 8)
    page = stream.blocks["latent"].layout
    assert page.bytes == page.tokens * (5 + 8)
    assert filled.bytes_in_bf16 == 2 * architectures.LAYERS * IDS.numel() * (20 + 8)


def test_latents_lose_something_and_keys_nothing(model, filled):
    kept = model(input_ids=IDS, use_cache=True).past_key_values
    for layer, exact in zip(filled.layers, kept.layers, strict=True):
        latents, keys = layer.read(0)
        if layer.index == 0:  # later layers read what earlier ones made of rounded rows
            assert torch.equal(keys, exact.values)
            assert torch.equal(latents[:, :, :SINK], exact.keys[:, :, :SINK])
            assert torch.equal(latents[:, :, -RECENT:], exact.keys[:, :, -RECENT:])
            middle = slice(SINK, -RECENT)
            error = (latents - exact.keys)[:, :, middle].norm() / exact.keys[:, :, middle].norm()
            assert 0.1 < error < 0.6


def test_rows_are_selected_and_tokens_taken_back(model, filled):
    before = [layer.read(0) for layer in filled.layers]
    filled.reorder_cache(torch.tensor([2, 0, 0]))
    for layer, (latents, keys) in zip(filled.layers, before, strict=True):
        selected = layer.read(0)
        assert torch.equal(selected[0], latents[[2, 0, 0]])
        assert torch.equal(selected[1], keys[[2, 0, 0]])
    filled.crop(-3)
    assert filled.get_seq_length() == IDS.shape[1] - 3
    for layer, (_, keys) in zip(filled.layers, before, strict=True):
        assert torch.equal(layer.read(0)[1], keys[[2, 0, 0], :, :-3])


def test_rotations_of_heads_are_refused(model):
    heads = architectures.build("llama")
    rotations = fit(None, PRESETS["random"], geometry_of(heads))
    with pytest.raises(RotationZooError, match="layer 0 has 1 KV heads of 20 channels"):
        read(model, RotatedCache(rotations, model))
    of_latents = fit(None, PRESETS["random"], geometry_of(model))
    with pytest.raises(RotationZooError, match="layer 0 has 2 KV heads of 16 channels"):
        read(heads, RotatedCache(of_latents, heads))
