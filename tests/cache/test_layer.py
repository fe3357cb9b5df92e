"""One layer of a 2-bit cache against one that keeps every row and computes anew what is read."""

import copy
from itertools import product

import pytest
import torch
from support.caches import with_means, with_transforms
from support.float64 import to_float64
from support.naive_cache import NaiveLayer

from rotationzoo.artifact.fit import fit
from rotationzoo.cache import stream
from rotationzoo.cache.layer import Padding, RotatedLayer, RotatedSlidingLayer
from rotationzoo.codec.formats import FORMATS, SGLANG, VLLM
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.codec.size import codec_bits
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Layer
from rotationzoo.recipe.loading import PRESETS

HEADS, KEY_DIM, VALUE_DIM = 2, 16, 12
GEOMETRY = [Layer(0, 0, 4, HEADS, KEY_DIM, VALUE_DIM)]
# What a call of `generate` may bring: prompts, chunks and single tokens.
CALLS = [5, 1, 1, 9, 1, 1, 1, 1, 12, 3, 1, 1, 1, 1, 1, 1]
RANDOM = with_means(to_float64(fit(None, PRESETS["random"], GEOMETRY)))
ARMS = {
    "one group": RotatedCodec(RANDOM),
    "groups": RotatedCodec(RANDOM, group_size=4),
    "transform": RotatedCodec(with_transforms(RANDOM), rounding="transform"),
}


def layer_of(arm, windows, starts=()):
    return RotatedLayer(CacheSettings(arm, windows, block=8), 0, Padding([*starts]))


def draw(batch, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, HEADS, tokens, dim) for dim in (KEY_DIM, VALUE_DIM))
    return [torch.randn(size, generator=generator) for size in sizes]


def feed(layer, rows, calls):
    """Hand rows over call by call; the keys and values that each call reads."""
    parts = zip(*(side.split(calls, dim=2) for side in rows), strict=True)
    return [layer.update(*part) for part in parts]


def first(tokens, read):
    return [side[:, :, :tokens] for side in read]


def assert_same(reads, expected):
    # Rows are rotated in float64, so that at most the last bit of their type may differ.
    for read, wanted in zip(reads, expected, strict=True):
        for rows, rows_wanted in zip(read, wanted, strict=True):
            eps = torch.finfo(rows.dtype).eps
            torch.testing.assert_close(rows, rows_wanted, rtol=eps, atol=eps)


@pytest.mark.parametrize("layout", ["server", "window"])
@pytest.mark.parametrize(
    ("name", "format", "sink", "recent", "dtype"),
    [
        *[(name, SGLANG, 3, 6, torch.float32) for name in ARMS],
        *product(["one group"], [SGLANG], [0, 4], [0, 5], [torch.float32]),
        *product(["groups"], FORMATS.values(), [2], [3], [torch.float32, torch.bfloat16]),
    ],
)
def test_every_call_reads_what_the_windows_say(name, format, sink, recent, dtype, layout):
    arm, windows = ARMS[name], CacheLayout(format, sink, recent, prefill_layout=layout)
    layer = layer_of(arm, windows)
    rows = [side.to(dtype) for side in draw(2, sum(CALLS))]
    reads = feed(layer, rows, CALLS)
    assert reads[-1][0].dtype == dtype
    assert_same(reads, feed(NaiveLayer(arm, windows), rows, CALLS))
    assert layer.get_seq_length() == sum(CALLS)
    exact = arm.keep_exact(rows[0], 0, "key")
    assert (reads[-1][0] - exact).abs().max() > 0.1, "something is quantized"


def test_a_window_shows_what_full_attention_would_show_of_it():
    arm, windows = ARMS["one group"], CacheLayout(sink=2, recent=3)
    rows = draw(2, sum(CALLS))
    full = feed(layer_of(arm, windows), rows, CALLS)
    for window in (2, 3, 7, 16, 60):
        storage = CacheSettings(arm, windows, block=8)
        layer = RotatedSlidingLayer(storage, 0, Padding(), window)
        before = 0
        parts = zip(*(side.split(CALLS, dim=2) for side in rows), strict=True)
        for new, read, part in zip(CALLS, full, parts, strict=True):
            columns, first = layer.get_mask_sizes(new)
            assert first == max(0, before - window + 1)
            seen = layer.update(*part)
            assert seen[0].shape[2] == columns
            assert_same([seen], [[side[:, :, first:] for side in read]])
            before += new
        stored = sum(len(stream.blocks["key"].table) for stream in layer.streams)
        assert stored <= window // 8 + 2, "blocks before the window are freed"


def test_what_is_quantized_is_not_taken_back():
    layer = layer_of(ARMS["one group"], CacheLayout(sink=2, recent=4))
    feed(layer, draw(1, 20), [20])
    before = layer.streams[0].read()
    taken_back = "5 tokens cannot be taken back: all but the last 4"
    with pytest.raises(RotationZooError, match=taken_back) as refusal:
        layer.crop(-5)
    assert "slack" in refusal.value.hint
    with pytest.raises(RotationZooError, match="a negative number of tokens, not 5"):
        layer.crop(5)
    layer.crop(-3)
    assert layer.get_seq_length() == 17
    assert_same([layer.streams[0].read()], [[side[:, :, :17] for side in before]])
    short = layer_of(ARMS["one group"], CacheLayout(sink=2, recent=4))
    feed(short, draw(1, 6), [6])
    short.crop(-9)
    assert short.get_seq_length() == 0


@pytest.mark.parametrize("taken_back", [0, 3], ids=["whole", "after a crop"])
def test_codes_that_are_chosen_ahead_are_those_of_each_token(taken_back, monkeypatch):
    reads = []
    for ahead in (1, 16):
        monkeypatch.setattr(stream, "AHEAD", ahead)
        layer = layer_of(ARMS["transform"], CacheLayout(sink=2, recent=6))
        feed(layer, draw(2, 21), [20, 1])
        layer.crop(-taken_back)
        reads.append(feed(layer, draw(2, 12, seed=1), [1] * 12))
    assert_same(*reads)


def test_a_window_does_not_reach_back_to_what_it_forgot():
    layer = RotatedSlidingLayer(
        CacheSettings(ARMS["one group"], CacheLayout(sink=0, recent=9)), 0, Padding(), 4
    )
    feed(layer, draw(1, 20), [20])
    with pytest.raises(RotationZooError, match="the window of layer 0 would reach"):
        layer.crop(-1)
    layer.crop(0)


@pytest.mark.parametrize("starts", [[], [0, 3, 1]], ids=["plain", "padded"])
def test_rows_are_chosen_and_repeated(starts):
    layer = layer_of(ARMS["one group"], CacheLayout(sink=2, recent=3), starts)
    feed(layer, draw(3, 24), [23, 1])
    rows = layer.update(*draw(3, 1, seed=9))
    copied = copy.deepcopy(layer)
    beams = torch.tensor([2, 2, 0])
    layer.reorder_cache(beams)
    again = draw(3, 1, seed=10)
    read = layer.update(*again)
    # One more token was quantized since.
    assert_same([first(22, read)], [[side[beams] for side in first(22, rows)]])
    # Rows that came from one row have grown apart.
    assert torch.equal(read[0][:, :, -1], ARMS["one group"].keep_exact(again[0], 0, "key")[:, :, 0])
    copied.batch_repeat_interleave(2)
    copied.batch_select_indices(torch.tensor([5, 1]))
    read = copied.update(*draw(2, 1, seed=11))
    assert_same([first(22, read)], [[side[[2, 0]] for side in first(22, rows)]])
    layer.reset()
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize("format", [SGLANG, VLLM], ids=["float32", "float16"])
def test_bytes_are_those_that_reports_state(format):
    """All tensors at the geometry of Qwen3-8B, and the same count at 131,072 tokens."""
    qwen3_8b = [Layer(index, index, 32, 8, 128, 128) for index in range(36)]
    windows, block = CacheLayout(format), 256
    arm = RotatedCodec(fit(None, PRESETS["identity"], qwen3_8b[:1]))

    def expected(tokens):
        blocks = -(-(tokens - windows.sink - windows.recent) // block)
        row = 128 // 4 + 2 * format.metadata_bits // 8
        return 2 * 8 * (blocks * block * row + 2 * 128 * (windows.sink + windows.recent))

    layer = RotatedLayer(CacheSettings(arm, windows), 0, Padding())
    rows = torch.randn(1, 8, 3000, 128).bfloat16()
    feed(layer, [rows, rows], [2990, *[1] * 10])
    held = sum(tensor.untyped_storage().nbytes() for tensor in layer.tensors())
    assert held == expected(3000)
    assert layer.bf16_bytes == 2 * rows.nbytes
    bits = 8 * expected(131072) / (131072 * 2 * 8 * 128)
    assert bits == pytest.approx(codec_bits(qwen3_8b, arm, windows), rel=0.001), "the last block"


def test_a_layer_without_a_rotation_is_refused():
    other = RotatedLayer(CacheSettings(ARMS["one group"]), 4, Padding())
    with pytest.raises(RotationZooError, match="there is no rotation for layer 4"):
        other.update(*draw(1, 1))
