"""Caches of other engines against other implementations of their formulas, and worked rows."""

import gguf
import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from rotationzoo.codec.formats import SGLANG
from rotationzoo.errors import UsageError
from rotationzoo.geometry import Layer
from rotationzoo.simulation.rivals import (
    ENGINE_CACHES,
    RivalCodec,
    check_engine_cache,
    read_exl3,
    read_int4_per_token_head,
    read_lloyd_max,
    read_q4_0,
    read_uniform,
)

ROWS = torch.randn(3, 2, 17, 128, generator=torch.Generator().manual_seed(0))
ROWS[0, 0, 0, :32] = 0  # a block whose scale is zero
ROWS[..., 5] *= 30
CLOSE = 1e-3
"""The largest relative difference to a float64 loop. In rare rows, sums in another order round a
code or a 16-bit scale differently. Otherwise at most 5e-7 was measured."""


def test_blocks_are_those_of_the_gguf_package():
    kind = gguf.GGMLQuantizationType.Q4_0
    blocks = gguf.quants.quantize(ROWS.numpy(), kind)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert torch.equal(read_q4_0(ROWS), expected)


def turn(rows: np.ndarray) -> np.ndarray:
    """Rows times a normalised Hadamard matrix, in float64."""
    dim = rows.shape[-1]
    return rows @ hadamard(dim) / np.sqrt(dim)


def difference(rows: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(rows.numpy() - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("bits", [3, 4])
def test_turboquant_rounds_values_between_their_extremes(bits):
    low, high = ROWS.numpy().min(-1, keepdims=True), ROWS.numpy().max(-1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    codes = np.rint((ROWS.numpy() - low) / step)
    expected = codes * step.astype(np.float16) + low.astype(np.float16)  # as they are stored
    assert difference(read_uniform(ROWS, bits), expected) < CLOSE


def test_int4_per_token_head_against_a_loop():
    """Halves away from zero, and an integer zero in the lowest bits of the scale."""
    generator = torch.Generator().manual_seed(0x9E3779B9)
    signs = 2 * torch.bernoulli(torch.full((128,), 0.5), generator=generator) - 1
    transformed = turn((ROWS[0, 0] * signs).double().numpy()) * np.sqrt(128)
    expected = []
    for row in transformed.astype(np.float32):
        scale = np.maximum((row.max() - row.min()) / np.float32(15), np.float32(1e-6))
        zero = int(np.clip(np.floor(-row.min() / scale + 0.5), 0, 15))
        steps = row / scale + zero
        codes = np.clip(np.trunc(steps + np.copysign(0.5, steps)), 0, 15)
        bits = (np.float32(scale).view(np.int32) & -16) | zero
        expected.append((codes - zero) * np.int32(bits).view(np.float32))
    expected = turn(np.array(expected)) * signs.numpy() / np.sqrt(128)
    assert difference(read_int4_per_token_head(ROWS[0, 0]), expected) < CLOSE


@pytest.mark.parametrize("bits", [3, 4])
def test_turboquant_keeps_the_norm_of_keys(bits):
    restored = read_lloyd_max(ROWS, bits)
    # The norm is stored in float16, whose relative rounding error is at most 2^-11.
    ratio = restored.norm(dim=-1) / ROWS.norm(dim=-1)
    assert (ratio - 1).abs().max() < 2**-11 + 1e-5
    # The distortion of Lloyd-Max on N(0, 1) is 0.0345 with 3 bits and 0.0095 with 4 (Max 1960).
    normal = torch.randn(4096, 128, generator=torch.Generator().manual_seed(2))
    error = (read_lloyd_max(normal, bits) - normal).square().mean().item()
    assert error == pytest.approx({3: 0.0345, 4: 0.0095}[bits], rel=0.06)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_exl3_rounds_to_the_nearest_of_symmetric_levels(bits):
    levels = (2 * np.arange(2**bits) + 1) / 2**bits - 1
    expected = []
    for block in turn(ROWS.double().numpy().reshape(-1, 32)):
        largest = np.abs(block).max()
        nearest = np.abs(block[:, None] - largest * levels).argmin(1)
        expected.append(levels[nearest] * float(np.float16(largest)))
    expected = turn(np.array(expected)).reshape(ROWS.shape)
    assert difference(read_exl3(ROWS, bits), expected) < CLOSE


def test_llama_cpp_spreads_a_towering_channel_over_the_row():
    """A whole row for keys, 64 channels for values, and none if 64 does not divide the head."""
    one = torch.zeros(1, 128)
    one[0, 3] = 8.0
    cache = ENGINE_CACHES["q4_0"]
    assert torch.allclose(cache["key"].read(one), one, atol=0.6)
    mixed = torch.cat([one + 0.01 * ROWS[0, 0, 1], one])
    tail_error = [
        (cache[side].read(mixed) - mixed)[0, 64:].abs().max().item() for side in ("key", "value")
    ]
    assert tail_error[1] < tail_error[0], "values of the second half never meet the channel"
    odd = torch.randn(4, 96, generator=torch.Generator().manual_seed(1))
    assert torch.equal(cache["key"].read(odd), read_q4_0(odd))


def stored_bits(name, side, dim=128):
    return RivalCodec.of_engine(name).stored_bits(0, side, dim, SGLANG)


def test_bits_are_those_of_the_packed_rows():
    bits = {name: stored_bits(name, "key") for name in ENGINE_CACHES}
    assert (bits["q4_0"], bits["fp8"]) == (4.5, 8)
    assert bits["int4_per_token_head"] == 4 + 32 / 128
    # `key_packed_size` and `value_packed_size` of vLLM's TurboQuantConfig, in bytes.
    assert bits["turboquant_3bit_nc"] * 128 / 8 == 128 * 3 / 8 + 2
    assert stored_bits("turboquant_3bit_nc", "value") * 16 == 48 + 4
    # Words and float16 scales of ExLlamaV3's `qshape_k` and `qshape_s`.
    assert [bits[f"exl3-{n}"] * 32 for n in (2, 3, 4)] == [n * 32 + 16 for n in (2, 3, 4)]


def test_heads_that_a_cache_cannot_store_are_refused():
    name, channels = "q4_0", 32
    fits = Layer(0, 0, query_heads=4, kv_heads=2, key_dim=2 * channels, value_dim=channels)
    check_engine_cache(name, [fits])
    odd = Layer(1, 1, query_heads=4, kv_heads=2, key_dim=channels, value_dim=channels + 8)
    with pytest.raises(UsageError, match=f"{channels} channels together, and values of layer 1"):
        check_engine_cache(name, [fits, odd])
