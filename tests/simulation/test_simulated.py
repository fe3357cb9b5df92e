"""The simulated cache in every family of models; `tests/cache/test_cache.py` holds it against one
that is really read call by call."""

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support import architectures
from support.architectures import CALIBRATED, families
from support.caches import distance, random_arm, read_in_calls, read_whole, simulate
from support.float64 import CLOSE
from support.naive_cache import naive_cache

from rotationzoo.codec import int2
from rotationzoo.codec.formats import BITS, SGLANG
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.evaluation.forward import attention_modules
from rotationzoo.geometry import shifted_layers
from rotationzoo.model import long_masks
from rotationzoo.model.geometry import geometry_of
from rotationzoo.simulation.rivals import RivalCodec, store_as_kivi
from rotationzoo.simulation.simulated import Observers, Simulation

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


def observe(model, arm, cache, queries=None):
    """Logits, and by layer the outputs (simulated, exact) and the KL."""
    geometry = geometry_of(model)
    outputs, divergences = {}, {}
    layers = {layer.index for layer in geometry}
    simulation = Simulation(arm, cache, geometry, layers, queries=queries)
    with simulation.running(
        model,
        attention_modules(model, IDS),
        Observers(
            output=lambda layer, output, exact: outputs.update({layer: (output, exact)}),
            kl=lambda layer, kl, _: divergences.update({layer: kl}),
        ),
    ):
        return read_whole(model, IDS), outputs, divergences


@families(CALIBRATED)
def test_a_cache_that_keeps_everything_exact_changes_nothing(name):
    """Windows, soft caps and sinks stay the model's although every position is there twice."""
    model = architectures.build(name, torch.float64)
    cache = CacheLayout(sink=24, recent=0)
    simulated, outputs, divergences = observe(
        model, random_arm(model), cache, queries=torch.arange(24)
    )
    assert distance(simulated, read_whole(model, IDS)) <= CLOSE
    assert len(outputs) == len(divergences) == len(geometry_of(model))
    assert max(kl.abs().max().item() for kl in divergences.values()) < 1e-6


@families(CALIBRATED)
def test_what_centring_moves_is_seen(name):
    """A server never adds the mean of keys back, so nor does the simulation: where attention does
    not ignore it, evaluation shows what that costs, and the look at the model says so before."""
    model = architectures.build(name, torch.float64)
    generator = torch.Generator().manual_seed(0)

    def center(_, side, rotation):
        if side != "key":
            return rotation
        mean = 3 * torch.randn(len(rotation.clip), rotation.dim, generator=generator)
        return replace(rotation, mean=mean)

    arm = RotatedCodec(random_arm(model).rotations.replace(center))
    cache = CacheLayout(sink=24, recent=0)
    simulated, _, divergences = observe(model, arm, cache, queries=torch.arange(24))
    moved = distance(simulated, read_whole(model, IDS))
    kl = max(divergence.max().item() for divergence in divergences.values())
    if shifted_layers(geometry_of(model)):
        assert (name in SHIFTED, moved > 0.01, kl > 0.01) == (True, True, True), (moved, kl)
    else:
        assert (name in SHIFTED, moved < 1e-4, kl < 1e-6) == (False, True, True), (moved, kl)


@families(CALIBRATED)
def test_a_cache_that_keeps_nothing_changes_everything_and_is_undone(name):
    model = architectures.build(name, torch.float64)
    plain = read_whole(model, IDS)
    cache = CacheLayout(sink=0, recent=0)
    simulated, outputs, divergences = observe(
        model, random_arm(model), cache, queries=torch.arange(24)
    )
    assert distance(simulated, plain) > 1e-4
    assert all((output - exact).norm() > 1e-3 * exact.norm() for output, exact in outputs.values())
    assert max(kl.max().item() for kl in divergences.values()) > 1e-6
    assert torch.equal(read_whole(model, IDS), plain), "not restored"


KIVI = RivalCodec(functools.partial(store_as_kivi, tokens=8, channels=8))


@pytest.mark.parametrize("name", ["rotated", "kivi"])
def test_more_bits_come_closer_to_the_exact_model(name):
    model, errors = architectures.build("llama", torch.float64), []
    unclipped = random_arm(model).rotations.replace(
        lambda _, __, rotation: replace(rotation, clip=torch.ones_like(rotation.clip))
    )
    arm = KIVI if name == "kivi" else RotatedCodec(unclipped)
    for bits in BITS:
        layout = CacheLayout(replace(SGLANG, bits=bits), sink=1, recent=2)
        _, outputs, _ = observe(model, arm, layout)
        simulated, exact = outputs[0]
        errors.append((simulated - exact).norm() / exact.norm())
    # Measured: 1.9 to 2.5 times smaller with one more bit, and 15 to 19 times with four more.
    assert all(fewer > 1.5 * more for fewer, more in pairwise(errors)), errors
    assert 1e-4 < errors[-1] < 0.05


# ---- keys per channel over groups of tokens, against a cache that is filled token by token


LONGER = torch.randint(3, 59, (2, 37), generator=torch.Generator().manual_seed(1))
CACHE = CacheLayout(sink=3, recent=5)
GROUP = 8


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
    rows = torch.randn(1, 2, 3 * GROUP, 16, generator=torch.Generator().manual_seed(0))
    dim = {"key": 2, "value": 3}[side]
    expected = torch.cat([quantize_block(block, dim) for block in rows.split(8, dim)], dim)
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
