"""Shapes from the model itself, beside those from the config, for small models of many families."""

import json

import pytest
from support.architectures import WINDOW, families
from support.models import save_family

from rotationzoo.capacity.meta_shape import parameters_on_meta, shape_on_meta
from rotationzoo.capacity.shape import CachedLayer, shape_of_config
from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.source import Source


def both(name, folder, **options):
    """The shape that the config tells, and the one that the model has."""
    save_family(name, folder, weights=False, **options)
    config = json.loads((folder / "config.json").read_text())
    return shape_of_config(config), shape_on_meta(Source(name, folder, None))


@families(["llama", "qwen3", "phi3", "mistral", "gemma2", "gemma3", "gpt_oss", "glm4_moe"])
def test_the_config_tells_what_the_model_does(name, tmp_path):
    """Layers and windows are equal; the matrices are nearly all parameters even of small models."""
    told, real = both(name, tmp_path)
    assert told.layers == real.layers
    assert (told.embedding, told.tied) == (real.embedding, real.tied)
    assert (told.experts, told.experts_per_token) == (real.experts, real.experts_per_token)
    assert told.parameters == pytest.approx(real.parameters, rel=2e-2)
    assert real.expert_parameters == pytest.approx(told.expert_parameters, rel=5e-2)


@families(["gemma2", "gemma3"])
def test_configs_from_before_layer_types(name, tmp_path):
    save_family(name, tmp_path, weights=False)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"]
    config["sliding_window_pattern"] = 2
    path.write_text(json.dumps(config))
    told = shape_of_config(config)
    assert [layer.window for layer in told.layers] == [WINDOW, None, WINDOW, None]
    assert told.layers == shape_on_meta(Source(name, tmp_path, None)).layers


@families(["gemma4"])
def test_layers_that_share_a_cache_count_once(name, tmp_path):
    """Four layers of which the last two read the caches of the first two."""
    told, real = both(name, tmp_path)
    assert told is None, "the config leaves this to the library"
    assert real.layers == (CachedLayer(2, 16, 16, WINDOW), CachedLayer(2, 32, 32, None))


@families(["qwen3_5"])
def test_states_of_linear_attention_count_once_a_request(name, tmp_path):
    """Three layers with a float32 matrix of 16 x 16 for each of 4 heads, and 3 inputs of a
    convolution over 2 x 2 x 16 + 4 x 16 channels."""
    _, real = both(name, tmp_path)
    assert len(real.layers) == 1
    assert real.state_bytes == 3 * (4 * 4 * 16 * 16 + 2 * 3 * 128)
    assert not real.uncounted_states


@families(["lfm2"])
def test_states_of_unknown_size_are_admitted(name, tmp_path):
    _, real = both(name, tmp_path)
    assert real.uncounted_states


@families(["deepseek_v3"])
def test_a_latent_is_told_by_the_config(name, tmp_path):
    save_family(name, tmp_path, weights=False)
    told = shape_of_config(json.loads((tmp_path / "config.json").read_text()))
    assert told.latent_elements == 4 * (20 + 8)
    assert not told.layers
    with pytest.raises(UnsupportedModel, match="latent"):
        shape_on_meta(Source(name, tmp_path, None))
    assert parameters_on_meta(Source(name, tmp_path, None)) > told.expert_parameters > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": ["mistral"]},
        {"num_hidden_layers": "4"},
        {"num_attention_heads": True},
        {"hidden_size": -64},
        {"num_hidden_layers": 1 << 30},
        {"layer_types": "full_attention"},
        {"layer_types": [["full_attention"]] * 4},
        {"layer_types": ["chunked_attention"] * 4},
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
    ],
    ids=str,
)
def test_what_a_damaged_or_new_config_says_is_left_to_the_library(tmp_path, changes):
    save_family("mistral", tmp_path, weights=False)
    config = json.loads((tmp_path / "config.json").read_text())
    assert shape_of_config(config) is not None
    assert shape_of_config(config | changes) is None
