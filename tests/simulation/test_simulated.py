"""The simulated cache in every family of models; `tests/cache/test_cache.py` has the real one."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support import architectures
from support.architectures import CALIBRATED, families
from support.caches import distance, random_arm, read_in_calls, read_whole, simulate
from support.float64 import CLOSE
from support.naive_cache import naive_cache

from rotationzoo.artifact.fit import fit
from rotationzoo.codec import int2
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.size import codec_bits
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.geometry import shifted_layers
from rotationzoo.model import long_masks
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.simulation.rivals import RivalCodec, store_as_kivi

IDS = torch.randint(3, 59, (2, 24), generator=torch.Generator().manual_seed(1))
SHIFTED = (
    "gemma2",  # a soft cap
    "gpt_oss",  # learned sinks in all layers
    "mimo_v2_flash",  # learned sinks in layers with a window
)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Rows as short as these would be read in one block of queries."""
    monkeypatch.setattr(long_masks, "BLOCK_QUERIES", 7)


@families(CALIBRATED)
def test_a_cache_that_keeps_everything_changes_nothing_and_one_that_keeps_nothing_does(name):
    model = architectures.build(name, torch.float64)
    plain, arm = read_whole(model, IDS), random_arm(model)
    simulated = simulate(model, arm, CacheLayout(sink=24, recent=0), IDS)
    assert distance(simulated, plain) <= CLOSE
    simulated = simulate(model, arm, CacheLayout(sink=0, recent=0), IDS)
    assert distance(simulated, plain) > 1e-4
    assert torch.equal(read_whole(model, IDS), plain), "not restored"


@families(CALIBRATED)
def test_what_centring_moves_is_seen(name):
    """Where attention does not ignore the mean of keys, which is never added back."""
    model = architectures.build(name, torch.float64)
    generator = torch.Generator().manual_seed(0)

    def center(_, side, rotation):
        if side != "key":
            return rotation
        mean = 3 * torch.randn(len(rotation.clip), rotation.dim, generator=generator)
        return replace(rotation, mean=mean)

    arm = RotatedCodec(random_arm(model).rotations.replace(center))
    simulated = simulate(model, arm, CacheLayout(sink=24, recent=0), IDS)
    moved = distance(simulated, read_whole(model, IDS))
    if shifted_layers(geometry_of(model)):
        assert (name in SHIFTED, moved > 0.01) == (True, True), moved
    else:
        assert (name in SHIFTED, moved < 1e-4) == (False, True), moved


KIVI = RivalCodec(partial(store_as_kivi, tokens=8, channels=8))


# ---- keys per channel over groups of tokens, against a cache that is filled token by token


LONGER = torch.randint(3, 59, (2, 37), generator=torch.Generator().manual_seed(1))
CACHE = CacheLayout(sink=3, recent=5)
GROUP = 8


def quantize_block(block: torch.Tensor, dim: int) -> torch.Tensor:
    """KIVI's own formula: minimum and scale over `dim`, both in float16."""
    minimum = block.amin(dim, keepdim=True).half().float()
    low = block.amin(dim, keepdim=True)
    scale = ((block.amax(dim, keepdim=True) - low) / 3).half().float()
    codes = ((block - minimum) / scale).round().clamp(0, 3)
    return codes * scale + minimum


@pytest.mark.parametrize("side", ["key", "value"])
def test_blocks_are_rounded_by_the_formula_of_kivi(side):
    """Keys over groups of tokens, values over groups of channels."""
    rows = torch.randn(1, 2, 3 * GROUP, 16, generator=torch.Generator().manual_seed(0))
    dim = {"key": 2, "value": 3}[side]
    blocks = [quantize_block(block, dim) for block in rows.split(8, dim)]
    expected = torch.cat(blocks, dim)
    stored = KIVI.fake_quantize(rows, 0, side, int2.SGLANG)
    assert (stored - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_simulation_is_what_a_cache_filled_token_by_token_gives(name):
    model = architectures.build(name, torch.float64)
    plain, simulated = read_whole(model, LONGER), simulate(model, KIVI, CACHE, LONGER)
    served = read_in_calls(model, naive_cache(KIVI, CACHE), LONGER, 1)
    assert distance(simulated, served) <= CLOSE
    first = CACHE.sink + CACHE.recent + GROUP - 1
    assert (simulated - plain)[:, :first].abs().max() <= CLOSE * plain.abs().max()
    assert (simulated - plain)[:, first:].abs().max() > 1e-3 * plain.abs().max()


# ---- which positions stay exact, and bits per element


def visible(cache: CacheLayout, length: int) -> list[list[int]]:
    """For each query, 1 for every position up to its own that it reads exact."""
    exact = cache.exact_for(torch.arange(length), length).int().tolist()
    return [row[: query + 1] for query, row in enumerate(exact)]


def test_decoding_keeps_the_sink_and_the_recent_tokens():
    rows = [[1], [1, 1], [1, 1, 1], [1, 0, 1, 1], [1, 0, 0, 1, 1]]
    assert visible(CacheLayout(sink=1, recent=2), 5) == rows


@pytest.mark.parametrize(("layout", "kept"), [("window", 1), ("server", 0)])
def test_a_window_keeps_the_recent_tokens_before_a_chunk_and_a_server_the_sink_alone(layout, kept):
    rows = visible(CacheLayout(sink=1, recent=1, prefill_chunk=3, prefill_layout=layout), 9)
    assert rows[2] == [1, 1, 1]
    assert rows[5] == [1, 0, kept, 1, 1, 1]
    assert rows[6] == [1, 0, 0, 0, 0, kept, 1]


@pytest.mark.parametrize(
    ("sink", "recent", "chunk"), [(64, 256, None), (1, 2, None), (0, 3, 4), (5, 9, 7), (7, 9, 7)]
)
@pytest.mark.parametrize("layout", ["server", "window"])
def test_the_first_query_that_reads_a_quantized_position(sink, recent, chunk, layout):
    cache = CacheLayout(sink=sink, recent=recent, prefill_chunk=chunk, prefill_layout=layout)
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
