"""Shapes of small models of several families, and bytes of weights: from files, the index, the hub
or the config."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from support.architectures import EXPECTED, LATENTS, SPARSE, WINDOW, families
from support.models import edit_config, save_family
from support.popular import CONFIGS, PARAMETERS, shape_of

from rotationzoo.capacity.cards import parse_card
from rotationzoo.capacity.plan import Wish, measure_capacity, remarks
from rotationzoo.capacity.shape import Shape, Storage, read_shape, weigh
from rotationzoo.codec.formats import VLLM
from rotationzoo.errors import ModelUnavailable
from rotationzoo.model.source import DEMO, Source


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
    layers = shape(name, tmp_path).layers
    shapes = [(each.layer.kv_heads, each.layer.key_dim, each.window) for each in layers]
    assert shapes == [(2, 16, WINDOW), (2, 32, None)]
    wish = Wish(str(tmp_path), None, 1, parse_card("24GiB"), Storage(VLLM))
    assert "serve takes no model whose layers" in " ".join(remarks(measure_capacity(wish)))


@families(["qwen3_5"])
def test_states_of_linear_attention_count_once_a_request(name, tmp_path):
    """Three layers with a float32 matrix of 16 x 16 for each of 4 heads, and 3 inputs of a
    convolution over 2 x 2 x 16 + 4 x 16 channels."""
    hybrid = shape(name, tmp_path)
    assert len(hybrid.layers) == 1
    assert hybrid.state_bytes == 3 * (4 * 4 * 16 * 16 + 2 * 3 * 128)
    assert not hybrid.uncounted_states


@families(["lfm2"])
def test_inputs_of_convolutions_count(name, tmp_path):
    """Three layers, and two inputs of 64 channels before the newest one."""
    assert shape(name, tmp_path).state_bytes == 3 * 2 * 2 * 64


@families(["minimax"])
def test_states_of_unknown_size_are_admitted(name, tmp_path):
    """They are in a cache of the family's own."""
    assert shape(name, tmp_path).uncounted_states


@families(LATENTS)
def test_latents_count_with_the_keys_beside_them(name, tmp_path):
    latent = shape(name, tmp_path)
    assert len(latent.layers) == len(EXPECTED[name].layers)
    assert {(each.layer.elements, each.layer.rope_dim) for each in latent.layers} == {(28, 8)}
    assert latent.parameters > latent.expert_parameters > 0
    capacity = measure_capacity(Wish(str(tmp_path), None, 1, parse_card("24GiB")))
    told = [line for line in remarks(capacity) if "keys of a sparse index" in line]
    assert bool(told) == (name in SPARSE)


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


def weights_of(name, folder, revision=None, **changes):
    return weigh(Source(name, folder, revision), {**CONFIGS[name], **changes}, shape_of(name))


def test_from_the_config(tmp_path):
    weights = weights_of("Qwen3-8B", tmp_path)
    assert weights.origin == "config"
    assert weights.published == pytest.approx(2 * PARAMETERS["Qwen3-8B"], rel=1e-4)
    single = weights_of("Qwen3-8B", tmp_path, torch_dtype="float32")
    assert single.published == 2 * weights.published
    odd = weights_of("Qwen3-8B", tmp_path, torch_dtype=["float32"], quantization_config="fp8")
    assert odd.published == weights.published, "what says nothing is taken for bfloat16"


@pytest.mark.parametrize(
    ("name", "kept"),
    # Embedding and output projection stay in 16 bits.
    [
        ("Llama-3.3-70B", 2 * 128_256 * 8192),
        ("Qwen3-4B", 151_936 * 2560),  # one matrix
    ],
)
def test_in_4_bits(tmp_path, name, kept):
    """4 bits a weight, and 20 for each group of 128: 4.15625."""
    expected = 2 * kept + (PARAMETERS[name] - kept) * 4.15625 / 8
    assert weights_of(name, tmp_path).four_bit == pytest.approx(expected, rel=1e-4)


def test_experts_published_in_4_bits(tmp_path):
    """gpt-oss-20b: 24 layers of 32 experts of 3 matrices in MXFP4, 4.25 bits; the rest in bf16."""
    weights = weights_of("gpt-oss-20b", tmp_path)
    experts = 24 * 32 * 3 * 2880 * 2880
    expected = experts * 4.25 / 8 + 2 * (PARAMETERS["gpt-oss-20b"] - experts)
    assert weights.published == pytest.approx(expected, rel=2e-3)
    assert weights.four_bit == weights.published


def test_from_the_index(tmp_path):
    size = 2 * PARAMETERS["Qwen3-8B"]
    shards = {"x": "model-00001-of-00002.safetensors"}  # which is not on this machine
    index = {"metadata": {"total_size": size}, "weight_map": shards}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = weights_of("Qwen3-8B", tmp_path)
    assert (weights.origin, weights.published) == ("index", size)


def test_from_the_files():
    weights = weights_of("Qwen3-8B", DEMO)
    assert weights.origin == "files"
    assert weights.published == (DEMO / "model.safetensors").stat().st_size


def test_from_the_hub(tmp_path, monkeypatch):
    asked = []

    def model_info(_, name, **options):
        asked.append((name, options))
        return SimpleNamespace(safetensors=SimpleNamespace(parameters=counts))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    counts = {"F8_E4M3": 1000, "BF16": 10, "F32": 1}
    weights = weights_of("DeepSeek-V3", tmp_path, "0" * 40)
    assert (weights.origin, weights.published) == ("hub", 1024)
    assert asked == [("DeepSeek-V3", {"revision": "0" * 40, "expand": ["safetensors"]})]
    counts = {"NEW_TYPE": 1000}
    assert weights_of("Qwen3-8B", tmp_path, "0" * 40).origin == "config"
