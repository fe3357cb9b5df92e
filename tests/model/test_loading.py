"""What a config alone says of a model's layers."""

import pytest
from support import architectures

from rotationzoo.geometry import full_attention_layers

FULL = {
    "llama": None,  # no layer has a window
    "phi3": set(),  # every layer has one
    "gemma3": {3},
    "gemma3-vlm": {3},
    "gpt_oss": {3},
    "gemma4": {1},  # the last layers read the cache of others
}


@pytest.mark.parametrize("family", FULL)
def test_layers_of_full_attention_stand_beside_sliding_windows(family):
    assert full_attention_layers(architectures.config(family)) == FULL[family]


@pytest.mark.parametrize(
    ("kinds", "full"),
    [
        (["hybrid", "hybrid_sliding"] * 2, {0, 2}),  # ZAYA and Inkling
        (["reference_sliding_attention"] * 4, None),  # Unlimited OCR reads all of a prompt
    ],
)
def test_sliding_windows_have_other_names(kinds, full):
    config = architectures.config("llama")
    config.layer_types = kinds
    assert full_attention_layers(config) == full
