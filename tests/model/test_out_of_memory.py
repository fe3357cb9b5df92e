"""Batches that run out of memory midway, in calibration and evaluation: halved, and counted
once."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import accelerate
import pytest
import torch
from support import architectures

from rotationzoo.calibration import collect as collecting
from rotationzoo.calibration.collect import collect
from rotationzoo.codec import int2
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.arms import build_arms
from rotationzoo.evaluation.forward import Trial, run_models
from rotationzoo.linalg.moments import to_raw
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.loading import forward_errors
from rotationzoo.model.out_of_memory import RowLimit, is_out_of_memory
from rotationzoo.progress import silent
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS

RECIPE = Recipe(sink=4)
IDS = torch.randint(3, 59, (7, 32), generator=torch.Generator().manual_seed(2))


@contextmanager
def room_for(model, rows: int, layer: int = 1) -> Iterator[list[int]]:
    """Inside the block, this layer of the model raises what a full GPU raises where a forward pass
    has more rows. Yields the rows of every pass that has got so far."""
    passes: list[int] = []

    def fail(module, args, kwargs) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        passes.append(len(hidden))
        if len(hidden) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    module = model.model.layers[layer].mlp  # after its attention, whose rows count already
    hook = module.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()


def assert_same(sums, expected) -> None:
    """The same rows in the same shapes. They may be added up in another order, which changes the
    last bits of float64."""
    assert sums.keys() == expected.keys()
    for key, tensor in sums.items():
        assert (tensor - expected[key]).norm() <= 1e-12 * expected[key].norm(), key


@pytest.fixture
def model():
    return architectures.build("qwen3", num_hidden_layers=3)


@pytest.mark.parametrize("name", ["oscar", "oscar-v1"])
def test_the_sums_are_those_of_smaller_batches(name, model, caplog):
    """oscar-v1 takes two passes."""
    recipe = PRESETS[name].model_copy(update={"sink": 4, "recent": 8})
    geometry = geometry_of(model)
    expected = to_raw(collect(model, geometry, [*IDS[:4].split(2), *IDS[4:].split(2)], recipe))
    with room_for(model, 2) as passes:
        sums = to_raw(collect(model, geometry, [IDS[:4], IDS[4:]], recipe))
    # Once memory has run out, the batches that follow are cut at once.
    first = [4, 2, 2, 2, 1]
    assert passes == ([*first, 2, 2, 2, 1] if name == "oscar-v1" else first)
    (line,) = caplog.messages
    assert line == "Memory ran out with 4 rows of 32 tokens in a forward pass; going on with 2"
    assert_same(sums, expected)


def test_nothing_is_copied_before_the_first_rows_of_a_batch(model, monkeypatch):
    """Its sums are zeros then, and copies would take as much memory as they do."""
    geometry, copied, keep = geometry_of(model), [], collecting.keep_sums
    monkeypatch.setattr(collecting, "keep_sums", lambda sums: copied.append(1) or keep(sums))
    with room_for(model, 4) as passes:
        collect(model, geometry, [IDS[:4], IDS[:4]], RECIPE)
        assert (passes, copied) == ([4, 4], [])
        collect(model, geometry, [IDS[:6]], RECIPE)
    assert (passes[2:], copied) == ([6, 3, 3], [1]), "the second half is added to the first"


def test_offloaded_weights_go_back_after_a_pass_that_failed(model, tmp_path):
    geometry = geometry_of(model)
    expected = to_raw(collect(model, geometry, list(IDS[:4].split(1)), RECIPE))
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    with room_for(model, 1):
        sums = to_raw(collect(model, geometry, [IDS[:4]], RECIPE))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_same(sums, expected)


def test_a_row_that_does_not_fit_ends_the_run(model):
    geometry = geometry_of(model)
    with (
        room_for(model, 0),
        pytest.raises(RotationZooError, match="a batch of 1 row of 32 tokens") as caught,
        forward_errors("the model", 7, 32),
    ):
        collect(model, geometry, [IDS], RECIPE)
    assert caught.value.hint == "add: --device-map auto, or a shorter --length"


def test_what_was_kept_for_earlier_rows_is_freed_first():
    kept = []

    def keep():
        assert all(earlier() is None for earlier in kept)

        def undo():
            raise AssertionError("no pass has failed")

        kept.append(weakref.ref(undo))
        return undo

    limit = RowLimit()
    limit.rows = 3
    limit.run(IDS, lambda ids: None, keep)
    assert len(kept) == 2, "a single row is not divided"


def test_other_errors_pass():
    def fail(ids):
        raise ValueError("of another kind")

    with pytest.raises(ValueError, match="of another kind"):
        RowLimit().run(IDS, fail, lambda: lambda: None)


def test_a_full_main_memory_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


def test_an_evaluation_measures_each_text_once(model):
    geometry = geometry_of(model)
    arms = build_arms([], geometry)
    caches = [CacheLayout(int2.SIMULATED["sglang"], 4, 8)]
    trial = Trial(geometry, arms, caches, [0, 1, 2], ("key", "value"), 4, 12)
    expected = run_models(model, [IDS[:2], IDS[2:4]], trial, silent)
    with room_for(model, 2):
        halved = run_models(model, [IDS[:4]], trial, silent)
    assert halved.exact.measure_exact() == expected.exact.measure_exact()
    for key, metrics in halved.arms.items():
        mine = metrics.measure_arm(halved.exact)
        other = expected.arms[key].measure_arm(expected.exact)
        assert mine.text_losses == other.text_losses
        assert mine.output_error == pytest.approx(other.output_error, rel=1e-12)
        # The queries that are compared are drawn once a batch.
        assert mine.attention_kl == pytest.approx(other.attention_kl, rel=0.2)
