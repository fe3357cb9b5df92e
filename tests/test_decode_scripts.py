"""The benchmarks of decoding rest on these: their caches, kernels and tables."""

from dataclasses import replace

import pytest
import torch
from benchmark_decode import SHAPES
from decode_arms import exact_arms as list_exact_arms
from decode_arms import exact_error, first_request, packed_variants
from decode_caches import LAYOUTS, Shape, Storage, exact_caches, packed_caches

from rotationzoo.codec.attention import attend

SHAPE = Shape(batch=2, context=200, heads=4, kv_heads=2, dim=64)
STORAGE = Storage("sglang", page=64, sink=8, recent=64)


@pytest.mark.parametrize("format", LAYOUTS)
def test_random_caches_can_be_read(format):
    caches = packed_caches(SHAPE, replace(STORAGE, format=format), 2, "cpu")
    for side in (caches[1].packed.key, caches[1].packed.value):
        addresses = replace(side, table=None).addresses()
        assert torch.equal(side.addresses(), addresses)
        restored = side.restore()
        assert restored.std() == pytest.approx(1.7, abs=0.2)  # codes of 0 to 3, scales near 1.5
    query = torch.randn(2, 4, 1, 64)
    ((_, read),) = packed_variants(attend, SHAPE)
    output = read(query, caches[1])
    assert torch.equal(read(query[:1], first_request(caches[1])), output[:1])


def test_bytes_are_those_of_the_published_table():
    shapes = [Shape(*map(int, name.split("x"))) for name in SHAPES.split(",")]
    assert shapes[1].bytes == 102_400 * 4096
    assert Storage("sglang").token_bytes(8, 128) == 640
    assert Storage("vllm").token_bytes(8, 128) == 576
    assert Storage("fine").token_bytes(8, 128) == 640
    assert Storage("sglang").bytes(shapes[1]) == 102_080 * 640 + 320 * 4096


def test_every_order_of_a_cache_in_memory_gives_its_own_attention():
    memory, query = exact_caches(SHAPE, 1, "cpu")[0], torch.randn(2, 4, 1, 64).bfloat16()
    for arm in list_exact_arms(SHAPE, None, ()):
        if arm.name == "sdpa flash":
            both = [arm.view(side, SHAPE) for side in memory]
            assert exact_error(arm.read(query, *both), query, *both) < 1e-2
