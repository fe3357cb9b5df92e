"""Bytes of caches and weights against figures computed by hand from the configs of popular models,
and the shapes of small models of several families."""

import json

import pytest
import torch
from support.architectures import EXPECTED, LATENTS, SPARSE, WINDOW, families
from support.models import save_family
from support.popular import CONFIGS, PARAMETERS, shape_of

from rotationzoo.capacity.plan import Wish, measure_capacity, parse_card, remarks
from rotationzoo.capacity.shape import CachedLayer, Shape, Storage, read_shape, weigh
from rotationzoo.codec.formats import FORMATS, SEGMENTS, SGLANG, VLLM
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.model.source import DEMO, Source

CONTEXT = 131072


def sliding_layer(heads: int, dim: int, window: int) -> CachedLayer:
    return CachedLayer(0, 0, heads, heads, dim, dim, window=window)


# Bytes of a token in bf16: layers x 2 sides x KV heads x head dimension x 2 bytes.
BF16 = {
    "Llama-3.3-70B": 327_680,  # 80 x 2 x 8 x 128 x 2
    "Qwen2.5-7B": 57_344,  # 28 x 2 x 4 x 128 x 2
    "Qwen3-4B": 147_456,  # 36 x 2 x 8 x 128 x 2
    "Qwen3-8B": 147_456,
    "Qwen3-30B-A3B": 98_304,  # 48 x 2 x 4 x 128 x 2
}


@pytest.mark.parametrize("name", BF16)
def test_models_with_full_attention(name):
    shape, storage = shape_of(name), Storage()
    bf16 = BF16[name]
    assert shape.request_bytes("bf16", CONTEXT, storage) == CONTEXT * bf16
    assert shape.request_bytes("fp8", CONTEXT, storage) == CONTEXT * bf16 // 2
    # In the format of sglang 32 and two float32: 40.
    exact = 64 + 256
    quantized = (CONTEXT - exact) * bf16 * 40 // 256
    assert shape.request_bytes("int2", CONTEXT, storage) == exact * bf16 + quantized
    assert shape.request_bytes("int2", 300, storage) == 300 * bf16, "all of it is exact"


def test_a_server_stores_every_token_and_copies_pages_that_windows_touch():
    """Qwen3-8B: 36 layers x 2 sides x 8 heads; a row of 128 takes 36 bytes, and 256 in bf16. The
    windows of a request touch 1 + 5 pages of 64 tokens."""
    shape, copies = shape_of("Qwen3-8B"), 6 * 64 * 147_456
    assert shape.request_bytes("int2", CONTEXT, Storage(VLLM)) == CONTEXT * 20_736 + copies
    assert shape.request_bytes("int2", 65, Storage(VLLM)) == 128 * 20_736 + copies
    budget = Storage(SEGMENTS, bits=3.0)
    assert shape.request_bytes("int2", CONTEXT, budget) == CONTEXT * 147_456 * 3 // 16 + copies
    # A chunk of a prompt has a window of its own, and slot 0 no request. Queries and what they read
    # are kept five times, keys and values once; a head and side has four matrices in float32, and
    # a query head has one in bf16.
    scratch = 2 * (5 * 8192 * 32 * 128 + 2 * 32_768 * 8 * 128)
    matrices = 36 * 2 * 128 * 128 * (4 * 4 * 8 + 2 * 32)
    expected = 64 * copies + 6 * 64 * 147_456 + scratch + matrices
    assert shape.server_bytes(budget, 64) == expected
    assert shape.server_bytes(Storage(SGLANG), 64) == 0


def test_a_server_keeps_layers_with_a_sliding_window_exact():
    oss, full = shape_of("gpt-oss-20b"), 12 * 2048
    pages = CONTEXT * full * 3 // 16 + 6 * 64 * full
    assert oss.request_bytes("int2", CONTEXT, Storage(SEGMENTS, bits=3.0)) == pages + 128 * full


def test_layers_with_a_sliding_window():
    # gemma-2-9b: 21 layers keep all, 21 keep 4,096; a layer has 2 x 8 x 256 elements a token.
    gemma = shape_of("gemma-2-9b")
    assert gemma.request_bytes("bf16", 8192, Storage()) == 21 * 8192 * (8192 + 4096)
    assert gemma.request_bytes("bf16", 4096, Storage()) == 42 * 8192 * 4096
    # gpt-oss-20b: 12 keep all, 12 keep 128; a layer has 2 x 8 x 64 elements a token.
    oss = shape_of("gpt-oss-20b")
    assert oss.request_bytes("bf16", CONTEXT, Storage()) == 12 * 2048 * (CONTEXT + 128)
    # In int2, a layer with 128 tokens keeps them all exact: they are among the last 256.
    row = 16 + 8  # bytes of 64 channels, and two float32
    full = 320 * 2048 + (CONTEXT - 320) * 16 * row
    assert oss.request_bytes("int2", CONTEXT, Storage()) == 12 * (full + 128 * 2048)


def test_a_window_forgets_the_sink():
    """Exact tokens, counted one by one as `codec.windows` defines them, where nothing is
    forgotten yet; and the last ones only where the first are."""
    shape, storage = Shape((sliding_layer(1, 8, 100),), 1), Storage(SGLANG, 4, 10)
    for context in (3, 14, 50, 100):
        last = torch.tensor([context - 1])
        exact = CacheLayout(SGLANG, 4, 10).exact_for(last, context).sum().item()
        expected = exact * 32 + (context - exact) * 20
        assert shape.request_bytes("int2", context, storage) == expected
    for context, exact in ((102, 12), (104, 10), (100_000, 10)):
        assert shape.request_bytes("int2", context, storage) == exact * 32 + (100 - exact) * 20


def test_a_latent_is_one_row_and_the_key_beside_it_stays_exact():
    """DeepSeek-V3: 61 layers x (512 + 64) elements; a quantized latent takes 512 / 4 bytes and two
    float32, and its key 128 bytes."""
    latent = shape_of("DeepSeek-V3")
    assert latent.request_bytes("bf16", CONTEXT, Storage()) == CONTEXT * 70_272
    assert latent.request_bytes("fp8", CONTEXT, Storage()) == CONTEXT * 35_136
    quantized = (CONTEXT - 320) * 61 * (128 + 8 + 128)
    assert latent.request_bytes("int2", CONTEXT, Storage()) == 320 * 70_272 + quantized


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cache", ["bf16", "int2"])
@pytest.mark.parametrize("name", ["Qwen3-8B", "gemma-2-9b"])
def test_the_longest_context_fits_and_one_more_token_does_not(name, cache, format):
    shape, storage, free = shape_of(name), Storage(FORMATS[format]), 8 << 30
    longest = shape.longest_context(cache, free, storage)
    assert shape.request_bytes(cache, longest, storage) <= free
    assert shape.request_bytes(cache, longest + 1, storage) > free
    assert shape.longest_context(cache, 0, storage) == 0
    assert shape.longest_context(cache, -1, storage) == 0


def test_a_model_of_sliding_layers_alone_has_no_longest_context():
    shape = Shape((sliding_layer(8, 128, 4096),) * 32, 2)
    assert shape.longest_context("bf16", 1 << 30, Storage()) is None
    assert shape.longest_context("bf16", (1 << 29) - 1, Storage()) == 4096 - 1


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_counted(name):
    assert shape_of(name).parameters == PARAMETERS[name]


# ---- shapes of small models of several families, and bytes of weights


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
    shapes = [(each.kv_heads, each.key_dim, each.window) for each in layers]
    assert shapes == [(2, 16, WINDOW), (2, 32, None)]
    wish = Wish(str(tmp_path), None, 1, parse_card("24GiB"), Storage(VLLM))
    assert "serve takes no model whose layers" in " ".join(remarks(measure_capacity(wish)))


# Three layers with a float32 matrix of 16 x 16 for each of 4 heads, and 3 inputs of a convolution
# over 2 x 2 x 16 + 4 x 16 channels; three layers with two inputs of 64 channels before the newest
# one; and states in a cache of the family's own, whose size nobody knows.
STATES = {"qwen3_5": 3 * (4 * 4 * 16 * 16 + 2 * 3 * 128), "lfm2": 3 * 2 * 2 * 64, "minimax": None}


@families(STATES)
def test_states_count_once_a_request_or_are_said_to_be_uncounted(name, tmp_path):
    hybrid = shape(name, tmp_path)
    assert len(hybrid.layers) == 1
    assert hybrid.uncounted_states == (STATES[name] is None)
    if STATES[name] is not None:
        assert hybrid.state_bytes == STATES[name]


@families(LATENTS)
def test_latents_count_with_the_keys_beside_them(name, tmp_path):
    latent = shape(name, tmp_path)
    assert len(latent.layers) == len(EXPECTED[name].layers)
    assert {(each.elements, each.rope_dim) for each in latent.layers} == {(28, 8)}
    assert latent.parameters > latent.expert_parameters > 0
    capacity = measure_capacity(Wish(str(tmp_path), None, 1, parse_card("24GiB")))
    told = [line for line in remarks(capacity) if "keys of a sparse index" in line]
    assert bool(told) == (name in SPARSE)


def weights_of(name, folder, revision=None, **changes):
    return weigh(Source(name, folder, revision), {**CONFIGS[name], **changes}, shape_of(name))


def test_from_the_config(tmp_path):
    weights, origin = weights_of("Qwen3-8B", tmp_path)
    assert origin == "config"
    assert weights["published"] == pytest.approx(2 * PARAMETERS["Qwen3-8B"], rel=1e-4)
    single, _ = weights_of("Qwen3-8B", tmp_path, torch_dtype="float32")
    assert single["published"] == 2 * weights["published"]
    odd, _ = weights_of("Qwen3-8B", tmp_path, torch_dtype=["float32"], quantization_config="fp8")
    assert odd == weights, "what says nothing is taken for bfloat16"


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
    weights, _ = weights_of(name, tmp_path)
    assert weights["4bit"] == pytest.approx(expected, rel=1e-4)


def test_experts_published_in_4_bits(tmp_path):
    """gpt-oss-20b: 24 layers of 32 experts of 3 matrices in MXFP4, 4.25 bits; the rest in bf16."""
    weights, _ = weights_of("gpt-oss-20b", tmp_path)
    experts = 24 * 32 * 3 * 2880 * 2880
    expected = experts * 4.25 / 8 + 2 * (PARAMETERS["gpt-oss-20b"] - experts)
    assert weights["published"] == pytest.approx(expected, rel=2e-3)
    assert weights["4bit"] == weights["published"]


def test_from_the_files_or_the_index(tmp_path):
    weights, origin = weights_of("Qwen3-8B", DEMO)
    assert origin == "files"
    assert weights["published"] == (DEMO / "model.safetensors").stat().st_size
    size = 2 * PARAMETERS["Qwen3-8B"]
    shards = {"x": "model-00001-of-00002.safetensors"}  # not on this machine
    index = {"metadata": {"total_size": size}, "weight_map": shards}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights, origin = weights_of("Qwen3-8B", tmp_path)
    assert (origin, weights["published"]) == ("index", size)
