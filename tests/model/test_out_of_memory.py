"""Batches that run out of memory midway, which end the run with a smaller number to give."""

import pytest
import torch
from support import architectures

from rotationzoo.calibration.collect import collect
from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.loading import forward_errors
from rotationzoo.model.placement import is_out_of_memory
from rotationzoo.recipe import Recipe

RECIPE = Recipe(sink=4)
IDS = torch.randint(3, 59, (7, 32), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("rows", "hint"), [(7, "add: --batch 3"), (1, "add: --device-map auto, or a shorter --length")]
)
def test_a_batch_that_does_not_fit_ends_the_run(rows, hint):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = architectures.build("qwen3", num_hidden_layers=3)
    geometry = geometry_of(model)
    # After the attention of the layer, whose rows count already.
    model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with (
        pytest.raises(RotationZooError, match=f"a batch of {rows} rows? of 32 tokens") as caught,
        forward_errors("the model", rows, 32),
    ):
        collect(model, geometry, [IDS[:rows]], RECIPE)
    assert caught.value.hint == hint


def test_a_full_main_memory_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
