"""Shapes of small models of several families."""

import json

import pytest
from support.architectures import EXPECTED, LATENTS, WINDOW, families
from support.models import edit_config, save_family

from rotationzoo.capacity.shape import CachedLayer, Shape, read_shape
from rotationzoo.errors import ModelUnavailable
from rotationzoo.model.source import Source


def shape(name, folder, **options) -> Shape:
    save_family(name, folder, weights=False, **options)
    return read_shape(Source(name, folder, None))


@families(["gemma2", "gemma3"])
def test_configs_from_before_layer_types(name, tmp_path):
    save_family(name, tmp_path, weights=False)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"]
    config["sliding_window_pattern"] = 2
    path.write_text(json.dumps(config))
    layers = read_shape(Source(name, tmp_path, None)).layers
    assert [layer.window for layer in layers] == [WINDOW, None, WINDOW, None]


@families(["gemma4"])
def test_layers_that_share_a_cache_count_once(name, tmp_path):
    """Four layers of which the last two read the caches of the first two."""
    expected = CachedLayer(2, 16, 16, WINDOW), CachedLayer(2, 32, 32, None)
    assert shape(name, tmp_path).layers == expected


@families(["qwen3_5"])
def test_states_of_linear_attention_count_once_a_request(name, tmp_path):
    """Three layers with a float32 matrix of 16 x 16 for each of 4 heads, and 3 inputs of a
    convolution over 2 x 2 x 16 + 4 x 16 channels."""
    hybrid = shape(name, tmp_path)
    assert len(hybrid.layers) == 1
    assert hybrid.state_bytes == 3 * (4 * 4 * 16 * 16 + 2 * 3 * 128)
    assert not hybrid.uncounted_states


@families(["lfm2"])
def test_states_of_unknown_size_are_admitted(name, tmp_path):
    assert shape(name, tmp_path).uncounted_states


@families(LATENTS)
def test_latents_count_with_the_keys_beside_them(name, tmp_path):
    latent = shape(name, tmp_path)
    assert len(latent.layers) == len(EXPECTED[name].layers)
    assert {(layer.elements, layer.rounded, layer.rows) for layer in latent.layers} == {(28, 20, 1)}
    assert latent.parameters > latent.expert_parameters > 0


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": "4"}, {"hidden_size": -64}, {"model_type": ["mistral"]}],
    ids=str,
)
def test_a_damaged_config_is_refused(tmp_path, changes):
    save_family("mistral", tmp_path, weights=False)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelUnavailable):
        read_shape(Source("mistral", tmp_path, None))
