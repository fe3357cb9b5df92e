"""The arm `kivi`: keys per channel over groups of tokens, against a cache that is filled token by
token."""

import pytest
import torch
import transformers
from support import architectures
from support.float64 import CLOSE, to_float64

from rotationzoo.calibration.fit import fit
from rotationzoo.codec import int2
from rotationzoo.model.geometry import cached_layers, geometry_of
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


class StepByStep:
    """The cache of one layer and side, written as a server would: one token at a time. A group is
    quantized once, when its last token leaves the recent window."""

    def __init__(self, side: str, matrix: torch.Tensor):
        self.side, self.matrix = side, matrix
        self.exact: list[torch.Tensor] = []
        self.stored: list[torch.Tensor] = []

    def append(self, row: torch.Tensor) -> None:
        """Add the row `[B, H, 1, D]` of the next token, then quantize what may be quantized."""
        self.exact.append(row)
        waiting = len(self.exact) - CACHE.sink - CACHE.recent - len(self.stored)
        if waiting < GROUP:
            return
        start = CACHE.sink + len(self.stored)
        rows = torch.cat(self.exact[start : start + GROUP], dim=2)
        block = (rows @ self.matrix).float()  # a scale rounded to float16 twice may be another
        if self.side == "key":
            block = quantize_block(block, dim=2)
        else:
            parts = [quantize_block(part, dim=3) for part in block.split(8, dim=3)]
            block = torch.cat(parts, dim=3)
        self.stored += (block.double() @ self.matrix.mT).split(1, dim=2)

    def read(self) -> torch.Tensor:
        """The rows `[B, H, T, D]` that a query reads."""
        sink = self.exact[: CACHE.sink]
        rest = self.exact[CACHE.sink + len(self.stored) :]
        return torch.cat([*sink, *self.stored, *rest], dim=2)


def served_logits(model, arm: KiviArm) -> torch.Tensor:
    """Logits of a model that reads one token at a time, from a cache filled step by step."""
    layers = [layer.index for layer in cached_layers(geometry_of(model))]
    sides = {
        (layer, side): StepByStep(side, arm.rotations[layer][side].matrix)
        for layer in layers
        for side in ("key", "value")
    }
    outputs = []
    for position in range(IDS.shape[1]):
        past = StepCache(sides, layers)
        with torch.no_grad():
            token = IDS[:, position : position + 1]
            outputs.append(model(input_ids=token, past_key_values=past, use_cache=True).logits)
    return torch.cat(outputs, dim=1)


class StepCache(transformers.DynamicCache):
    """A cache of transformers whose rows are those of `StepByStep`."""

    def __init__(self, sides, layers):
        super().__init__()
        self.sides, self.first = sides, layers[0]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        rows = []
        for side, new in (("key", key_states), ("value", value_states)):
            self.sides[layer_idx, side].append(new)
            rows.append(self.sides[layer_idx, side].read())
        return tuple(rows)

    def get_seq_length(self, layer_idx=0):
        return len(self.sides[self.first, "key"].exact)

    def get_mask_sizes(self, query_length, layer_idx):
        return self.get_seq_length() + int(query_length), 0


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
