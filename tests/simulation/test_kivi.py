"""The arm `kivi`: keys per channel over groups of tokens, against a cache that is filled token by
token."""

import pytest
import torch
import transformers
from support import architectures
from support.float64 import CLOSE, to_float64
from support.naive_cache import NaiveLayer

from rotationzoo.calibration.fit import fit
from rotationzoo.codec import int2
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import PRESETS
from rotationzoo.simulation.kivi import KiviArm
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.simulated import Simulation

IDS = torch.randint(3, 59, (2, 37), generator=torch.Generator().manual_seed(1))
CACHE = CacheLayout(sink=3, recent=5)
GROUP = 8


def arm_for(model, preset: str = "identity") -> KiviArm:
    rotations = to_float64(fit(None, PRESETS[preset], geometry_of(model)))
    return KiviArm("kivi", rotations, tokens=GROUP, channels=8)


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


@torch.no_grad()
def served_logits(model, arm: KiviArm) -> torch.Tensor:
    """Logits of a model that reads one token at a time, from a cache by the letter."""
    past = transformers.DynamicCache()
    past.layers = [NaiveLayer(arm, CACHE, index) for index in range(architectures.LAYERS)]
    past.layer_class_to_replicate = None
    steps = IDS.split(1, dim=1)
    return torch.cat([model(input_ids=ids, past_key_values=past).logits for ids in steps], dim=1)


@pytest.mark.parametrize("preset", ["identity", "random"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_simulation_is_what_a_cache_filled_token_by_token_gives(name, preset):
    model = architectures.build(name, torch.float64)
    arm = arm_for(model, preset)
    geometry = geometry_of(model)
    layers = {layer.index for layer in geometry}
    with torch.no_grad():
        plain = model(input_ids=IDS, use_cache=False).logits
        with Simulation(arm, CACHE, geometry, layers).running(model):
            simulated = model(input_ids=IDS, use_cache=False).logits
    served = served_logits(model, arm)
    distance = (simulated - served).abs().max() / served.abs().max()
    assert distance <= CLOSE
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
