"""Which positions a cache keeps exact for whom, when decoding and when prefilling in chunks."""

import pytest
import torch

from rotationzoo.simulation.layout import CacheLayout


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


def test_a_window_keeps_the_recent_tokens_before_a_chunk():
    rows = visible(CacheLayout(sink=1, recent=1, prefill_chunk=3, prefill_layout="window"), 9)
    assert rows[2] == [1, 1, 1]
    assert rows[5] == [1, 0, 1, 1, 1, 1]
    assert rows[6] == [1, 0, 0, 0, 0, 1, 1]


def test_a_server_keeps_only_the_sink_of_earlier_chunks():
    rows = visible(CacheLayout(sink=1, recent=1, prefill_chunk=3), 9)
    assert rows[2] == [1, 1, 1]
    assert rows[5] == [1, 0, 0, 1, 1, 1]
    assert rows[6] == [1, 0, 0, 0, 0, 0, 1]


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
