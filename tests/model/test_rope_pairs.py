"""Which channels RoPE mixes and which heads share a norm, on every family that can be captured."""

from functools import cache

import pytest
import torch
from support import architectures

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model import loading
from rotationzoo.model.attention_probe import AttentionProbe
from rotationzoo.model.foldable import find_key_scales
from rotationzoo.model.geometry import cached_layers, geometry_of, geometry_on_meta
from rotationzoo.model.rope_pairs import _describe, partner_channels, with_rope_pairs

NAMES = [
    name
    for name in architectures.NAMES
    if architectures.available(name) and not architectures.EXPECTED[name].refusal
]
# Family -> pairs, their distance, and whether heads share a norm. Others are like `llama`.
EXPECTED = {name: {(8, 8, False)} for name in NAMES}
for sharing in ("qwen3", "gemma3", "gemma3-vlm", "lfm2", "doge", "qwen3_vl"):
    EXPECTED[sharing] = {(8, 8, True)}
for partial in ("qwen3_next", "qwen3_5", "qwen3_5-vlm"):
    EXPECTED[partial] = {(2, 2, True)}
EXPECTED |= {
    "gemma4": {(8, 8, True), (16, 16, True)},
    "glm4_moe": {(4, 4, False)},
    "mimo_v2_flash": {(3, 3, False)},
    "llama4": {(8, 1, True), (0, 0, False)},  # neighbours; layers without RoPE have no norm
}


# One of each kind, because tracing takes a while.
TRACED = [
    name
    for name in ("llama", "qwen3", "gemma4", "glm4_moe", "mimo_v2_flash", "llama4", "qwen3_5")
    if name in NAMES
]


@cache
def measured_model(name):
    """A model that no test changes, and its geometry with RoPE pairs."""
    model = architectures.build(name)
    return model, with_rope_pairs(model, geometry_of(model))


@pytest.mark.parametrize("name", NAMES)
def test_pairs_and_shared_norms_are_measured(name):
    model, geometry = measured_model(name)
    measured = {(layer.rope_pairs, layer.rope_distance, layer.shared_norm) for layer in geometry}
    assert measured == EXPECTED[name]
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_rope_commutes_with_factors_that_are_equal_within_pairs(name):
    """What RoPE makes of a pair depends on the pair alone, and linearly."""
    model, geometry = measured_model(name)
    vectors = AttentionProbe(model).run(scale=False)
    for layer in cached_layers(geometry):
        partners = partner_channels(layer.key_dim, layer.rope_pairs, layer.rope_distance)
        # [T, D, rows]: the rows of a channel at each position.
        first, *others = vectors[layer.index][1].flatten(0, 1).permute(1, 2, 0)
        pairs = torch.stack([first, first[partners]], -1)
        for turned in others:
            # By the pseudoinverse, because a channel may be its own partner.
            fitted = (pairs @ (torch.linalg.pinv(pairs) @ turned[..., None]))[..., 0]
            # 1e-7 was measured: norms and rotary tables are float32.
            assert ((fitted - turned).norm(dim=1) <= 1e-5 * turned.norm(dim=1)).all()


@pytest.mark.parametrize("name", TRACED)
def test_measured_pairs_are_those_that_tracing_the_weights_gives(name):
    """Two independent ways to find which factors must be equal."""
    _, geometry = measured_model(name)
    on_meta = loading.on_meta(architectures.config(name), name)
    geometry_on_meta(on_meta)  # chooses an implementation of experts that runs there
    try:
        scales = find_key_scales(on_meta, geometry, name)
    except UnsupportedModel:
        assert name == "llama4"
        return
    for layer in cached_layers(geometry):
        partners = torch.tensor(
            partner_channels(layer.key_dim, layer.rope_pairs, layer.rope_distance)
        )
        classes = torch.minimum(torch.arange(layer.key_dim), partners).repeat(layer.kv_heads, 1)
        if not layer.shared_norm:
            classes += layer.key_dim * torch.arange(layer.kv_heads)[:, None]
        measured, traced = classes.flatten(), scales.classes[layer.index].flatten()
        joined = measured[:, None] == measured
        assert torch.equal(joined, traced[:, None] == traced)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slow_pairs_of_wide_heads_are_seen(dtype):
    """The slowest of 128 pairs turns by 0.0003 over the whole context."""
    model = architectures.build(
        "llama", head_dim=256, max_position_embeddings=4096, num_hidden_layers=1,
        num_key_value_heads=1, rope_parameters=dict(rope_type="default", rope_theta=1e7),
    )  # fmt: skip
    (layer,) = with_rope_pairs(model.to(dtype), geometry_of(model))
    assert (layer.rope_pairs, layer.rope_distance) == (128, 128)


def test_pairs_of_another_pattern_are_refused():
    assert _describe(partner_channels(16, 4, 4), 0) == (4, 4)
    assert _describe(partner_channels(16, 3, 8), 0) == (8, 8)
    assert _describe(partner_channels(16, 4, 1), 0) == (4, 1)
    assert _describe(list(range(16)), 0) == (0, 0)
    with pytest.raises(UnsupportedModel, match="layer 3 in pairs of no known pattern"):
        _describe([0, 1, 6, 3, 4, 5, 2, 15, 8, 9, 10, 11, 12, 13, 14, 7], 3)
