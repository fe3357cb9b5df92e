"""Bits per element of an arm's cache, with its exact tokens counted one by one."""

from dataclasses import replace

import pytest
import torch
from support import architectures

from rotationzoo.calibration.fit import fit
from rotationzoo.codec import int2
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import PRESETS
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.kivi import KiviArm
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.size import CONTEXT, arm_bits, bits_per_element

GEOMETRY = geometry_of(architectures.build("llama"))
ROTATIONS = fit(None, PRESETS["identity"], GEOMETRY)
ARMS = [
    Arm("one group", ROTATIONS),
    Arm("groups of 8", ROTATIONS, 8),
    KiviArm("kivi", ROTATIONS),
    KiviArm("kivi", ROTATIONS, tokens=64, channels=8),
]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: f"{arm.name}-{arm.token_group}")
@pytest.mark.parametrize("length", [10, 400, 511, 2048])
def test_every_token_counts(arm, length):
    cache = CacheLayout(int2.SGLANG, sink=16, recent=64)
    grouped = CacheLayout(int2.SGLANG, sink=16, recent=64, token_group=arm.token_group)
    exact = grouped.exact_for(torch.arange(length), length)[-1].sum().item()
    assert grouped.quantized_tokens(length) == length - exact
    # Head dimension 16 on both sides, so that each side is half of the elements.
    stored = sum(arm.stored_bits(side, 16, int2.SGLANG) for side in ("key", "value")) / 2
    expected = (16 * exact + stored * (length - exact)) / length
    assert arm_bits(GEOMETRY, arm, cache, length) == pytest.approx(expected)


def test_an_arm_of_rotations_takes_what_its_recipe_says():
    cache = CacheLayout()
    bits = bits_per_element(GEOMETRY, replace(cache, group_size=8))
    assert arm_bits(GEOMETRY, ARMS[1], cache, CONTEXT) == pytest.approx(bits)
