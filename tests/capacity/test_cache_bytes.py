"""Bytes of caches, held against figures computed by hand from the configs of popular models."""

import pytest
import torch
from support.popular import PARAMETERS, shape_of

from rotationzoo.capacity.cache_bytes import Storage, elements, longest_context, request_bytes
from rotationzoo.capacity.shape import CachedLayer, Shape
from rotationzoo.codec.formats import FORMATS, SGLANG, VLLM
from rotationzoo.simulation.layout import CacheLayout

CONTEXT = 131072

# Bytes of a token in bf16: layers x 2 sides x KV heads x head dimension x 2 bytes.
BF16 = {
    "Llama-3.1-8B": 131_072,  # 32 x 2 x 8 x 128 x 2
    "Llama-3.3-70B": 327_680,  # 80 x 2 x 8 x 128 x 2
    "Qwen2.5-7B": 57_344,  # 28 x 2 x 4 x 128 x 2
    "Qwen3-4B": 147_456,  # 36 x 2 x 8 x 128 x 2
    "Qwen3-8B": 147_456,
    "Qwen3-30B-A3B": 98_304,  # 48 x 2 x 4 x 128 x 2
}
# The same for a quantized token in the format of sglang: a row of 128 takes 32 bytes and two
# float32, 40 bytes together; so layers x 2 x KV heads x 40.
INT2 = {
    "Llama-3.1-8B": 20_480,
    "Llama-3.3-70B": 51_200,
    "Qwen2.5-7B": 8_960,
    "Qwen3-4B": 23_040,
    "Qwen3-8B": 23_040,
    "Qwen3-30B-A3B": 15_360,
}


@pytest.mark.parametrize("name", BF16)
def test_models_with_full_attention(name):
    shape, storage = shape_of(name), Storage()
    bf16 = BF16[name]
    assert request_bytes(shape, "bf16", CONTEXT, storage) == CONTEXT * bf16
    assert request_bytes(shape, "fp8", CONTEXT, storage) == CONTEXT * bf16 // 2
    # A row of 128 in int4 takes 64 bytes and two float32: 72 instead of 256.
    assert request_bytes(shape, "int4", CONTEXT, storage) == CONTEXT * bf16 * 72 // 256
    exact = 64 + 256
    quantized = (CONTEXT - exact) * INT2[name]
    assert request_bytes(shape, "int2", CONTEXT, storage) == exact * bf16 + quantized
    assert request_bytes(shape, "int2", 300, storage) == 300 * bf16, "all of it is exact"


def test_qwen3_8b_to_the_byte():
    assert request_bytes(shape_of("Qwen3-8B"), "int2", CONTEXT, Storage()) == 3_059_712_000
    bits = 8 * 3_059_712_000 / elements(shape_of("Qwen3-8B"), CONTEXT)
    assert round(bits, 2) == 2.53


def test_256_requests_of_100_000_tokens_on_qwen3_4b():
    """Per token 36 x 2 x 8 rows of 32 + 4 bytes, 20,736; of a request, 99,680 tokens so and 320
    exact: 2,114,150,400 bytes."""
    request = request_bytes(shape_of("Qwen3-4B"), "int2", 100_000, Storage(VLLM))
    assert request == 99_680 * 20_736 + 320 * 147_456 == 2_114_150_400
    assert round(256 * request / 1e9) == 541


def test_layers_with_a_sliding_window():
    # gemma-2-9b: 21 layers keep all, 21 keep 4,096; a layer has 2 x 8 x 256 elements a token.
    gemma = shape_of("gemma-2-9b")
    assert request_bytes(gemma, "bf16", 8192, Storage()) == 21 * 8192 * (8192 + 4096)
    assert request_bytes(gemma, "bf16", 4096, Storage()) == 42 * 8192 * 4096
    # gpt-oss-20b: 12 keep all, 12 keep 128; a layer has 2 x 8 x 64 elements a token.
    oss = shape_of("gpt-oss-20b")
    assert request_bytes(oss, "bf16", CONTEXT, Storage()) == 12 * 2048 * (CONTEXT + 128)
    # In int2, a layer with 128 tokens keeps them all exact: they are among the last 256.
    row = 16 + 8  # bytes of 64 channels, and two float32
    full = 320 * 2048 + (CONTEXT - 320) * 16 * row
    assert request_bytes(oss, "int2", CONTEXT, Storage()) == 12 * (full + 128 * 2048)


def test_a_window_forgets_the_sink():
    """Exact tokens, counted one by one as `simulation.layout` defines them, where nothing is
    forgotten yet; and the last ones only where the first are."""
    shape, storage = Shape((CachedLayer(1, 8, 8, window=100),), 1, True), Storage(SGLANG, 4, 10)
    for context in (3, 14, 50, 100):
        last = torch.tensor([context - 1])
        exact = CacheLayout(SGLANG, 4, 10).exact_for(last, context).sum().item()
        expected = exact * 32 + (context - exact) * 20
        assert request_bytes(shape, "int2", context, storage) == expected
    for context, exact in ((102, 12), (104, 10), (100_000, 10)):
        assert request_bytes(shape, "int2", context, storage) == exact * 32 + (100 - exact) * 20


def test_a_latent_is_one_row_and_the_key_beside_it_stays_exact():
    """DeepSeek-V3: 61 layers x (512 + 64) elements; a quantized latent takes 512 / 4 bytes and two
    float32, and its key 128 bytes."""
    latent = shape_of("DeepSeek-V3")
    assert request_bytes(latent, "bf16", CONTEXT, Storage()) == CONTEXT * 70_272
    assert request_bytes(latent, "fp8", CONTEXT, Storage()) == CONTEXT * 35_136
    assert request_bytes(latent, "int4", CONTEXT, Storage()) == CONTEXT * 61 * (256 + 8 + 128)
    quantized = (CONTEXT - 320) * 61 * (128 + 8 + 128)
    assert request_bytes(latent, "int2", CONTEXT, Storage()) == 320 * 70_272 + quantized


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cache", ["bf16", "int4", "int2"])
@pytest.mark.parametrize("name", ["Qwen3-8B", "gemma-2-9b"])
def test_the_longest_context_fits_and_one_more_token_does_not(name, cache, format):
    shape, storage, free = shape_of(name), Storage(FORMATS[format]), 8 << 30
    longest = longest_context(shape, cache, free, storage)
    assert request_bytes(shape, cache, longest, storage) <= free
    assert request_bytes(shape, cache, longest + 1, storage) > free
    assert longest_context(shape, cache, 0, storage) == 0
    assert longest_context(shape, cache, -1, storage) == 0


def test_a_model_of_sliding_layers_alone_has_no_longest_context():
    shape = Shape((CachedLayer(8, 128, 128, window=4096),) * 32, 1, False)
    assert longest_context(shape, "bf16", 1 << 30, Storage()) is None
    assert longest_context(shape, "bf16", (1 << 29) - 1, Storage()) == 4096 - 1


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_counted(name):
    assert shape_of(name).parameters == PARAMETERS[name]
