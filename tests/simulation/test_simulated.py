"""The simulated cache against one that is really read token by token, in every family of models."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers
from support import architectures
from support.architectures import CALIBRATED, families
from support.float64 import CLOSE, to_float64

from rotationzoo.calibration.fit import fit
from rotationzoo.codec.formats import BITS, SGLANG
from rotationzoo.model import long_masks
from rotationzoo.model.capture import intercept
from rotationzoo.model.geometry import cached_layers, geometry_of, shifted_layers
from rotationzoo.recipe import PRESETS
from rotationzoo.rotations import Rotations
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.kivi import KiviArm
from rotationzoo.simulation.layout import CacheLayout
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


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def attention_modules(model) -> dict[int, torch.nn.Module]:
    modules = {}

    def note(layer, query, key, value, attend):
        modules[layer] = attend.module
        return attend(query, key, value)

    with intercept(model, note):
        logits(model)
    return modules


def simulate(model, arm, cache, queries=None):
    """Logits, and by layer the outputs (simulated, exact) and the KL."""
    geometry = geometry_of(model)
    outputs, divergences = {}, {}
    layers = {layer.index for layer in geometry}
    simulation = Simulation(arm, cache, geometry, layers, queries=queries)
    with simulation.running(
        model,
        attention_modules(model),
        Observers(
            output=lambda layer, output, exact: outputs.update({layer: (output, exact)}),
            kl=lambda layer, kl, _: divergences.update({layer: kl}),
        ),
    ):
        return logits(model), outputs, divergences


def random_arm(model) -> Arm:
    return Arm("random", to_float64(fit(None, PRESETS["random"], geometry_of(model))))


def relative_change(simulated: torch.Tensor, plain: torch.Tensor) -> float:
    return ((simulated - plain).abs().max() / plain.abs().max()).item()


@families(CALIBRATED)
def test_a_cache_that_keeps_everything_exact_changes_nothing(name):
    """Windows, soft caps and sinks stay the model's although every position is there twice."""
    model = architectures.build(name, torch.float64)
    cache = CacheLayout(sink=24, recent=0)
    simulated, outputs, divergences = simulate(
        model, random_arm(model), cache, queries=torch.arange(24)
    )
    assert relative_change(simulated, logits(model)) <= CLOSE
    assert len(outputs) == len(divergences) == len(geometry_of(model))
    assert max(kl.abs().max().item() for kl in divergences.values()) < 1e-6


def with_key_means(rotations: Rotations, means: dict[int, torch.Tensor]) -> Rotations:
    return rotations.replace(
        lambda layer, side, rotation: (
            replace(rotation, mean=means[layer]) if side == "key" else rotation
        )
    )


@families(CALIBRATED)
def test_what_centring_moves_is_seen(name):
    """A server never adds the mean of keys back, so nor does the simulation: where attention does
    not ignore it, evaluation shows what that costs, and the look at the model says so before."""
    model = architectures.build(name, torch.float64)
    geometry = geometry_of(model)
    generator = torch.Generator().manual_seed(0)
    means = {
        layer.index: 3 * torch.randn(layer.kv_heads, layer.key_dim, generator=generator)
        for layer in cached_layers(geometry)
    }
    arm = Arm("centered", with_key_means(random_arm(model).rotations, means))
    cache = CacheLayout(sink=24, recent=0)
    simulated, _, divergences = simulate(model, arm, cache, queries=torch.arange(24))
    moved = relative_change(simulated, logits(model))
    kl = max(divergence.max().item() for divergence in divergences.values())
    if shifted_layers(geometry):
        assert (name in SHIFTED, moved > 0.01, kl > 0.01) == (True, True, True), (moved, kl)
    else:
        assert (name in SHIFTED, moved < 1e-4, kl < 1e-6) == (False, True, True), (moved, kl)


@families(CALIBRATED)
def test_a_cache_that_keeps_nothing_changes_everything_and_is_undone(name):
    model = architectures.build(name, torch.float64)
    plain = logits(model)
    cache = CacheLayout(sink=0, recent=0)
    simulated, outputs, divergences = simulate(
        model, random_arm(model), cache, queries=torch.arange(24)
    )
    assert relative_change(simulated, plain) > 1e-4
    assert all((output - exact).norm() > 1e-3 * exact.norm() for output, exact in outputs.values())
    assert max(kl.max().item() for kl in divergences.values()) > 1e-6
    assert torch.equal(logits(model), plain), "not restored"


def server_logits(model, arm: Arm, cache: CacheLayout) -> torch.Tensor:
    """The logits of a server: token by token (or chunk by chunk) with a cache whose older entries
    are stored in 2 bits."""
    layers = [layer.index for layer in cached_layers(geometry_of(model))]
    history: dict[int, list[torch.Tensor]] = {}  # exact keys and values by layer
    outputs, step = [], cache.prefill_chunk or 1
    for start in range(0, IDS.shape[1], step):
        stop = min(start + step, IDS.shape[1])
        past = transformers.DynamicCache()
        if history:
            exact = exact_positions(cache, start)
            for layer in layers:
                past.update(*mix(arm, cache, layer, history[layer], exact), layer)
        with torch.no_grad():
            result = model(input_ids=IDS[:, start:stop], past_key_values=past, use_cache=True)
        outputs.append(result.logits)
        for layer in layers:
            both = (past.layers[layer].keys, past.layers[layer].values)
            new = [rows[:, :, start:] for rows in both]
            if start:
                new = [torch.cat(pair, 2) for pair in zip(history[layer], new, strict=True)]
            history[layer] = new
    return torch.cat(outputs, dim=1)


def exact_positions(cache: CacheLayout, start: int) -> torch.Tensor:
    """Boolean `[start]`: which earlier positions are exact for a step that begins at `start`."""
    # The recent tokens end with a query's own, or before its chunk; a server has written them in 2
    # bits by then.
    end = start if cache.prefill_chunk else start + 1
    recent = 0 if cache.prefill_chunk and cache.prefill_layout == "server" else cache.recent
    position = torch.arange(start)
    return (position < cache.sink) | (position >= end - recent)


def mix(arm: Arm, cache: CacheLayout, layer: int, rows: list[torch.Tensor], exact: torch.Tensor):
    """Keys and values of a layer, exact where they are kept so and else as they are stored."""
    for side, exact_rows in zip(("key", "value"), rows, strict=True):
        stored = arm.fake_quantize(exact_rows, layer, side, cache.format)
        yield torch.where(exact[:, None], exact_rows, stored)


CACHES = {
    "decode": CacheLayout(sink=2, recent=5),
    "server": CacheLayout(sink=3, recent=4, prefill_chunk=7),
    "window": CacheLayout(sink=3, recent=4, prefill_chunk=7, prefill_layout="window"),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@families(["llama", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_the_simulation_is_what_a_server_computes(name, cache):
    model = architectures.build(name, torch.float64)
    arm = random_arm(model)
    served = server_logits(model, arm, cache)
    simulated, _, _ = simulate(model, arm, cache)
    assert relative_change(simulated, served) <= CLOSE
    changed = relative_change(served, logits(model))
    assert changed > 1e-3, "the cache does change something here"


@pytest.mark.parametrize("kind", [Arm, KiviArm])
def test_more_bits_come_closer_to_the_exact_model(kind):
    model, errors = architectures.build("llama", torch.float64), []
    unclipped = random_arm(model).rotations.replace(
        lambda _, __, rotation: replace(rotation, clip=torch.ones_like(rotation.clip))
    )
    arm = kind("", unclipped)
    if kind is KiviArm:
        arm = replace(arm, tokens=8, channels=8)
    for bits in BITS:
        layout = CacheLayout(replace(SGLANG, bits=bits), sink=1, recent=2)
        _, outputs, _ = simulate(model, arm, layout)
        simulated, exact = outputs[0]
        errors.append((simulated - exact).norm() / exact.norm())
    # Measured: 1.9 to 2.5 times smaller with one more bit, and 15 to 19 times with four more.
    assert all(fewer > 1.5 * more for fewer, more in pairwise(errors)), errors
    assert 1e-4 < errors[-1] < 0.05
