"""Other engines' caches, against other implementations of their formulas and worked rows, and in
the simulation, where every token is read as the engine stores it."""

import gguf
import numpy as np
import pytest
import torch

from rotationzoo.simulation.engine_caches import (
    ENGINE_CACHES,
    gaussian_centroids,
    read_int4_per_token_head,
    read_lloyd_max,
    read_q4_0,
    read_q8_0,
)

ROWS = torch.randn(3, 2, 17, 128, generator=torch.Generator().manual_seed(0))
ROWS[0, 0, 0, :32] = 0  # a block whose scale is zero
ROWS[..., 5] *= 30


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (read_q4_0, gguf.GGMLQuantizationType.Q4_0),
        (read_q8_0, gguf.GGMLQuantizationType.Q8_0),
    ],
    ids=["q4_0", "q8_0"],
)
def test_blocks_are_those_of_the_gguf_package(read, kind):
    blocks = gguf.quants.quantize(ROWS.numpy(), kind)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert torch.equal(read(ROWS), expected)


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_llama_cpp_spreads_a_towering_channel_over_the_row(name):
    """Its Hadamard matrices: a whole row for keys, 64 channels for values, and none where 64 does
    not divide the head dimension."""
    one = torch.zeros(1, 128)
    one[0, 3] = 8.0
    cache = ENGINE_CACHES[name]
    assert torch.allclose(cache.key.read(one), one, atol=0.6)
    mixed = torch.cat([one + 0.01 * ROWS[0, 0, 1], one])
    tail_error = [
        (cache.side(side).read(mixed) - mixed)[0, 64:].abs().max().item()
        for side in ("key", "value")
    ]
    assert tail_error[1] < tail_error[0], "values of the second half never meet the channel"
    odd = torch.randn(4, 96, generator=torch.Generator().manual_seed(1))
    plain = read_q4_0 if name == "q4_0" else read_q8_0
    assert torch.equal(cache.key.read(odd), plain(odd))


def test_int4_per_token_head_against_a_loop():
    """Written anew from the kernel: halves away from zero, an integer zero in the scale's lowest
    bits."""
    generator = torch.Generator().manual_seed(0x9E3779B9)
    signs = 2 * torch.bernoulli(torch.full((128,), 0.5), generator=generator) - 1
    transformed = ROWS[0, 0] * signs
    width = 1
    while width < 128:  # the butterfly, unnormalised
        pairs = transformed.reshape(-1, 128 // (2 * width), 2, width)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        transformed = torch.stack([first + second, first - second], 2).reshape(-1, 128)
        width *= 2
    expected = []
    for row in transformed.numpy():
        scale = np.maximum((row.max() - row.min()) / np.float32(15), np.float32(1e-6))
        zero = int(np.clip(np.floor(-row.min() / scale + 0.5), 0, 15))
        steps = row / scale + zero
        codes = np.clip(np.trunc(steps + np.copysign(0.5, steps)), 0, 15)
        bits = (np.float32(scale).view(np.int32) & -16) | zero
        expected.append((codes - zero) * np.int32(bits).view(np.float32))
    rows = torch.tensor(np.array(expected), dtype=torch.float32)
    hadamard = torch.ones(1, 1)
    while len(hadamard) < 128:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    expected = rows @ hadamard * signs / 128
    difference = (read_int4_per_token_head(ROWS[0, 0]) - expected).norm() / expected.norm()
    # Measured: 5.0e-7. Sums in another order round a code otherwise in rare rows.
    assert difference < 1e-3


def test_centroids_are_those_of_max_1960():
    published = torch.tensor([0.2451, 0.7560, 1.344, 2.152], dtype=torch.float64)
    centroids = gaussian_centroids(3)
    assert torch.allclose(centroids[4:], published, atol=5e-4)
    assert torch.allclose(centroids, -centroids.flip(0), atol=1e-12)
    assert gaussian_centroids(4).abs().min().item() == pytest.approx(0.1284, abs=1e-4)


@pytest.mark.parametrize("bits", [3, 4])
def test_turboquant_keeps_the_norm_of_keys(bits):
    restored = read_lloyd_max(ROWS, bits)
    # The norm is stored in float16, whose relative rounding error is at most 2^-11.
    ratio = restored.norm(dim=-1) / ROWS.norm(dim=-1)
    assert (ratio - 1).abs().max() < 2**-11 + 1e-5
    # The distortion of Lloyd-Max on N(0, 1) is .0345 with 3 bits and .0095 with 4 (Max 1960).
    normal = torch.randn(4096, 128, generator=torch.Generator().manual_seed(2))
    error = (read_lloyd_max(normal, bits) - normal).square().mean().item()
    assert error == pytest.approx({3: 0.0345, 4: 0.0095}[bits], rel=0.06)


def test_bits_are_those_of_the_packed_rows():
    bits = {name: cache.key.bits_per_element(128) for name, cache in ENGINE_CACHES.items()}
    assert (bits["q8_0"], bits["q4_0"], bits["fp8"]) == (8.5, 4.5, 8)
    assert bits["int4_per_token_head"] == 4 + 32 / 128
    # `key_packed_size` and `value_packed_size` of vLLM's TurboQuantConfig, in bytes.
    assert bits["turboquant_3bit_nc"] * 128 / 8 == 128 * 3 / 8 + 2
    assert ENGINE_CACHES["turboquant_3bit_nc"].value.bits_per_element(128) * 16 == 48 + 4
