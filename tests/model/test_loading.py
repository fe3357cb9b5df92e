"""The layers of a config with full attention, and batches that run out of memory."""

import pytest
import torch
from support import architectures

from rotationzoo.calibration.collect import collect
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import full_attention_layers
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.loading import forward_errors
from rotationzoo.model.placement import is_out_of_memory
from rotationzoo.recipe import Recipe

FULL = [
    ("llama", {}, None),  # no layer has a window
    ("phi3", {}, set()),  # every layer has one
    ("gemma3", {}, {3}),
    ("gemma3-vlm", {}, {3}),
    ("gpt_oss", {}, {3}),
    ("gemma4", {}, {1}),  # the last layers read the cache of others
    ("llama", {"layer_types": ["hybrid", "hybrid_sliding"] * 2}, {0, 2}),  # ZAYA and Inkling
    # Unlimited OCR reads all of a prompt.
    ("llama", {"layer_types": ["reference_sliding_attention"] * 4}, None),
]


@pytest.mark.parametrize(("family", "changes", "full"), FULL, ids=str)
def test_layers_of_full_attention_are_found_among_sliding_windows(family, changes, full):
    config = architectures.config(family)
    vars(config).update(changes)
    assert full_attention_layers(config) == full


IDS = torch.randint(3, 59, (7, 32), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("rows", "hint"), [(7, "add: --batch 3"), (1, "add: --device-map auto, or a shorter --length")]
)
def test_a_batch_that_does_not_fit_ends_the_run(rows, hint):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = architectures.build("qwen3", num_hidden_layers=3)
    geometry, says = geometry_of(model), f"a batch of {rows} rows? of 32 tokens"
    # After the attention of the layer, whose rows are already in the sums.
    model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with (
        pytest.raises(RotationZooError, match=says) as caught,
        forward_errors("the model", rows, 32),
    ):
        collect(model, geometry, [IDS[:rows]], Recipe(sink=4))
    assert caught.value.hint == hint


def test_a_full_main_memory_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
