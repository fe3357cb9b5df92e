"""The arm `kivi`: keys per channel over groups of tokens, against a cache that is filled token by
token."""

import pytest
import torch
from support import architectures
from support.caches import distance, random_arm, read_in_calls, read_whole, simulate
from support.float64 import CLOSE
from support.naive_cache import naive_cache

from rotationzoo.codec import int2
from rotationzoo.simulation.kivi import KiviArm
from rotationzoo.simulation.layout import CacheLayout

IDS = torch.randint(3, 59, (2, 37), generator=torch.Generator().manual_seed(1))
CACHE = CacheLayout(sink=3, recent=5)
GROUP = 8


def arm_for(model, preset: str = "identity") -> KiviArm:
    return KiviArm("kivi", random_arm(model, preset).rotations, tokens=GROUP, channels=8)


def quantize_block(block: torch.Tensor, dim: int) -> torch.Tensor:
    """KIVI's own formula: minimum and scale over `dim`, both in float16, rounded to 0 to 3."""
    minimum = block.amin(dim, keepdim=True).half().float()
    low = block.amin(dim, keepdim=True)
    scale = ((block.amax(dim, keepdim=True) - low) / 3).half().float()
    codes = ((block - minimum) / scale).round().clamp(0, 3)
    return codes * scale + minimum


@pytest.mark.parametrize("side", ["key", "value"])
def test_blocks_are_rounded_by_the_formula_of_kivi(side):
    """Keys over groups of tokens, values over groups of channels."""
    model = architectures.build("llama")
    arm = arm_for(model, "random")
    rows = torch.randn(1, 2, 3 * GROUP, 16, generator=torch.Generator().manual_seed(0)).double()
    matrix, dim = arm.rotations[0][side].matrix, {"key": 2, "value": 3}[side]
    blocks = (rows @ matrix).float().split(8, dim)
    expected = torch.cat([quantize_block(block, dim) for block in blocks], dim)
    stored = arm.fake_quantize(rows, 0, side, int2.SGLANG)
    assert (stored - expected.double() @ matrix.mT).abs().max() < 1e-5


@pytest.mark.parametrize("preset", ["identity", "random"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_simulation_is_what_a_cache_filled_token_by_token_gives(name, preset):
    model = architectures.build(name, torch.float64)
    arm = arm_for(model, preset)
    plain, simulated = read_whole(model, IDS), simulate(model, arm, CACHE, IDS)
    served = read_in_calls(model, naive_cache(arm, CACHE), IDS, 1)
    assert distance(simulated, served) <= CLOSE
    first = CACHE.sink + CACHE.recent + GROUP - 1
    assert (simulated - plain)[:, :first].abs().max() <= CLOSE * plain.abs().max()
    assert (simulated - plain)[:, first:].abs().max() > 1e-3 * plain.abs().max()


def test_a_towering_key_channel_costs_the_others_nothing():
    """What a rotation lacks: each channel has a scale of its own."""
    model = architectures.build("llama", torch.float64)
    arm = arm_for(model)
    keys = torch.randn(1, 2, 2 * GROUP, 16, generator=torch.Generator().manual_seed(0))
    towering = keys.clone()
    towering[..., 3] *= 1000
    plain, other = (arm.fake_quantize(rows, 0, "key", int2.SGLANG) for rows in (keys, towering))
    rest = [channel for channel in range(16) if channel != 3]
    assert torch.equal(plain[..., rest], other[..., rest])
    values = arm.fake_quantize(towering, 0, "value", int2.SGLANG)
    assert not torch.equal(values[..., rest], plain[..., rest])
