"""Which key channels share a factor, traced on every family and kept in the geometry."""

from dataclasses import replace

import pytest
import torch
from support import architectures
from support.architectures import EQUALIZED, families
from support.equalizers import traced_geometry

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.geometry import Layer
from rotationzoo.model.key_classes import key_classes, with_key_classes

# Family -> pairs, their distance, and whether heads share a norm. Others are like `llama`.
EXPECTED = {name: {(8, 8, False)} for name in EQUALIZED}
for sharing in ("qwen3", "gemma3", "gemma3-vlm", "lfm2", "doge", "qwen3_vl"):
    EXPECTED[sharing] = {(8, 8, True)}
for partial in ("qwen3_next", "qwen3_5", "qwen3_5-vlm"):
    EXPECTED[partial] = {(2, 2, True)}
EXPECTED |= {
    "gemma4": {(8, 8, True), (16, 16, True)},
    "glm4_moe": {(4, 4, False)},
    "mimo_v2_flash": {(3, 3, False)},
}


@families(EQUALIZED)
def test_pairs_and_shared_norms_are_traced(name):
    geometry = traced_geometry(architectures.config(name))
    traced = {(layer.rope_pairs, layer.rope_distance, layer.shared_norm) for layer in geometry}
    assert traced == EXPECTED[name]


def layer(pairs: int | None, distance: int, shared: bool | None = False) -> Layer:
    return Layer(
        0, 0, query_heads=2, kv_heads=2, key_dim=8, value_dim=8,
        rope_pairs=pairs, rope_distance=distance, shared_norm=shared,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pairs", "distance", "expected"),
    [
        (4, 4, [0, 1, 2, 3, 0, 1, 2, 3]),
        (2, 2, [0, 1, 0, 1, 4, 5, 6, 7]),
        (2, 4, [0, 1, 2, 3, 0, 1, 6, 7]),
        (4, 1, [0, 0, 2, 2, 4, 4, 6, 6]),
        (2, 1, [0, 0, 2, 2, 4, 5, 6, 7]),
        (0, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_the_geometry_describes_classes(pairs, distance, expected, shared):
    described = layer(pairs, distance, shared)
    first, second = key_classes(described)
    assert first.tolist() == expected
    assert torch.equal(second, first if shared else first + 8)
    plain = replace(described, rope_pairs=None, rope_distance=None, shared_norm=None)
    renamed = {0: 100 - torch.stack([first, second])}  # any numbers will do
    assert with_key_classes([plain], renamed) == [described]


@pytest.mark.parametrize(
    ("pairs", "distance", "shared"),
    [(None, 4, False), (4, 4, None), (5, 4, False), (5, 1, False), (4, 5, False), (4, 0, False)],
)
def test_what_describes_no_classes_is_seen(pairs, distance, shared):
    assert key_classes(layer(pairs, distance, shared)) is None


def test_another_pattern_is_refused():
    crossed = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
    halves = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    some_shared = torch.stack([halves, torch.tensor([0, 9, 10, 11, 0, 9, 10, 11])])
    for classes in (crossed.expand(2, -1), some_shared):
        with pytest.raises(UnsupportedModel, match=r"layer 0 .* share factors in no known pattern"):
            with_key_classes([layer(None, 0)], {0: classes})
