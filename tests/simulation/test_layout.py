"""Which positions a cache keeps exact for whom, and how many bits an element takes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support import architectures

from rotationzoo.artifact.fit import fit
from rotationzoo.codec import int2
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.size import CONTEXT, bits_per_element, codec_bits
from rotationzoo.geometry import Layer
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.simulation.rivals import RivalCodec, store_as_kivi


def visible(cache: CacheLayout, length: int) -> list[list[int]]:
    """For each query, 1 for every position up to its own that it reads exact."""
    exact = cache.exact_for(torch.arange(length), length).int().tolist()
    return [row[: query + 1] for query, row in enumerate(exact)]


def test_decoding_keeps_the_sink_and_the_recent_tokens():
    assert visible(CacheLayout(sink=1, recent=2), 5) == [
        [1],
        [1, 1],
        [1, 1, 1],
        [1, 0, 1, 1],
        [1, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(("layout", "kept"), [("window", 1), ("server", 0)])
def test_a_window_keeps_the_recent_tokens_before_a_chunk_and_a_server_the_sink_alone(layout, kept):
    rows = visible(CacheLayout(sink=1, recent=1, prefill_chunk=3, prefill_layout=layout), 9)
    assert rows[2] == [1, 1, 1]
    assert rows[5] == [1, 0, kept, 1, 1, 1]
    assert rows[6] == [1, 0, 0, 0, 0, kept, 1]


@pytest.mark.parametrize(
    "cache",
    [
        CacheLayout(),
        CacheLayout(sink=1, recent=2),
        CacheLayout(sink=0, recent=3, prefill_chunk=4),
        CacheLayout(sink=5, recent=9, prefill_chunk=7),
        CacheLayout(sink=0, recent=3, prefill_chunk=4, prefill_layout="window"),
        CacheLayout(sink=5, recent=9, prefill_chunk=7, prefill_layout="window"),
        CacheLayout(sink=7, recent=9, prefill_chunk=7),
    ],
    ids=lambda cache: f"{cache.sink}-{cache.recent}-{cache.prefill_chunk}-{cache.prefill_layout}",
)
def test_the_first_query_that_reads_a_quantized_position(cache):
    rows = visible(cache, 400)
    reads = [query for query, row in enumerate(rows) if not all(row)]
    assert reads[0] == cache.first_quantized
    exact_until_query = [row[cache.sink :][::-1].index(0) for row in rows if not all(row)]
    assert max(exact_until_query) == cache.reach


GEOMETRY = geometry_of(architectures.build("llama"))
ROTATIONS = fit(None, PRESETS["identity"], GEOMETRY)
ARMS = [
    RotatedCodec(ROTATIONS),
    RotatedCodec(ROTATIONS, 8),
    RivalCodec(store_as_kivi),
    RivalCodec(partial(store_as_kivi, tokens=64, channels=8)),
]


@pytest.mark.parametrize("arm", ARMS, ids=["one group", "groups of 8", "kivi", "kivi-64"])
@pytest.mark.parametrize("length", [10, 400, 511, 2048])
def test_every_token_counts(arm, length):
    cache = CacheLayout(int2.SGLANG, sink=16, recent=64)
    grouped = CacheLayout(int2.SGLANG, sink=16, recent=64, token_group=arm.token_group)
    exact = grouped.exact_for(torch.arange(length), length)[-1].sum().item()
    assert grouped.quantized_tokens(length) == length - exact
    # Head dimension 16 on both sides, so that each side is half of the elements.
    stored = sum(arm.stored_bits(0, side, 16, int2.SGLANG) for side in ("key", "value")) / 2
    expected = (16 * exact + stored * (length - exact)) / length
    assert codec_bits(GEOMETRY, arm, cache, length) == pytest.approx(expected)


def test_bits_per_element_count_exact_tokens():
    heads = [Layer(0, 0, 1, 1, 128, 128)]
    assert bits_per_element(heads, CacheLayout()) == pytest.approx(2.5330, abs=1e-4)
    vllm = CacheLayout(int2.FORMATS["vllm"])
    assert bits_per_element(heads, vllm) == pytest.approx(2.2836, abs=1e-4)
    assert 16 / bits_per_element(heads, CacheLayout()) == pytest.approx(6.3, abs=0.05)
    assert bits_per_element(heads, CacheLayout(), 100) == 16


def test_an_arm_of_rotations_takes_what_its_recipe_says():
    cache = CacheLayout()
    bits = bits_per_element(GEOMETRY, replace(cache, group_size=8))
    assert codec_bits(GEOMETRY, ARMS[1], cache, CONTEXT) == pytest.approx(bits)
