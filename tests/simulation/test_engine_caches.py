"""Other engines' caches in the simulation: what they multiply rows with, what they take, and which
models and tokens they store."""

import pytest
import torch

from rotationzoo.codec.formats import SGLANG
from rotationzoo.errors import UsageError
from rotationzoo.model.geometry import Layer
from rotationzoo.simulation.engine_caches import ENGINE_CACHES, EngineArm
from rotationzoo.simulation.engine_formats import read_kvarn, read_q4_0, read_q8_0

ROWS = torch.randn(3, 2, 300, 128, generator=torch.Generator().manual_seed(0))
ROWS[..., 5] *= 30


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


def stored_bits(name, side, dim=128):
    return EngineArm(name).stored_bits(side, dim, SGLANG)


def test_bits_are_those_of_the_packed_rows():
    bits = {name: stored_bits(name, "key") for name in ENGINE_CACHES}
    assert (bits["q8_0"], bits["q4_0"], bits["fp8"]) == (8.5, 4.5, 8)
    assert bits["int4_per_token_head"] == 4 + 32 / 128
    # `key_packed_size` and `value_packed_size` of vLLM's TurboQuantConfig, in bytes.
    assert bits["turboquant_3bit_nc"] * 128 / 8 == 128 * 3 / 8 + 2
    assert stored_bits("turboquant_3bit_nc", "value") * 16 == 48 + 4
    # `k_packed_bytes`, `k_scale_bytes`, `v_packed_bytes` and `v_scale_bytes` of KVarN's config.
    assert stored_bits("kvarn-k4v2", "key") * 128 * 128 / 8 == 8192 + 2 * (2 * 128 + 128)
    assert stored_bits("kvarn-k4v2", "value", 64) * 128 * 64 / 8 == 2048 + 2 * (64 + 2 * 128)
    # Words and float16 scales of ExLlamaV3's `qshape_k` and `qshape_s`.
    assert [bits[f"exl3-{n}"] * 32 for n in (2, 3, 4)] == [n * 32 + 16 for n in (2, 3, 4)]
    # LMDeploy's `get_quant_cache_descs`: two numbers of a key, one of a value.
    assert bits["lmdeploy-42"] == 4 + 2 * 16 / 128
    assert stored_bits("lmdeploy-42", "value") == 2 + 16 / 128
    assert [bits[f"mlx-{n}"] for n in (2, 3, 4)] == [2.5, 3.5, 4.5]
    assert bits["nvfp4"] == 4.5


def test_tokens_of_an_incomplete_tile_stay_exact():
    arm = EngineArm("kvarn-k4v2")
    assert arm.token_group == 128
    for side, bits in (("key", 4), ("value", 2)):
        stored = arm.fake_quantize(ROWS, 0, side, None)
        assert torch.equal(stored[:, :, 256:], ROWS[:, :, 256:])
        tile = ROWS[1, 1, 128:256]
        expected = read_kvarn(tile, bits, per_channel=side == "key")
        error = (stored[1, 1, 128:256] - expected).norm() / tile.norm()
        # Measured: 0. Sums in another order may round a code otherwise, and no tile reads another.
        assert error < 1e-2
        assert torch.equal(arm.fake_quantize(ROWS[:, :, :100], 0, side, None), ROWS[:, :, :100])


@pytest.mark.parametrize(("name", "channels"), [("mlx-2", 64), ("nvfp4", 16), ("q4_0", 32)])
def test_heads_that_a_cache_cannot_store_are_refused(name, channels):
    fits = Layer(0, 0, query_heads=4, kv_heads=2, key_dim=2 * channels, value_dim=channels)
    EngineArm(name).check([fits])
    odd = Layer(1, 1, query_heads=4, kv_heads=2, key_dim=channels, value_dim=channels + 8)
    with pytest.raises(UsageError, match=f"{channels} channels together, and values of layer 1"):
        EngineArm(name).check([fits, odd])
