"""What a config alone says of a model's layers."""

import pytest
from support import architectures

from rotationzoo.model.loading import full_attention_layers

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
