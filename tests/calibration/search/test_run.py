"""A search over a whole model."""

import copy
from dataclasses import replace

import pytest
import torch
from support import architectures
from support.searches import ROWS, search_recipe, task_for

from rotationzoo.artifact.layout import rotation_tensors
from rotationzoo.cache.arm import Arm
from rotationzoo.calibration import checkpoint as checkpoints
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.search import layers, memory, run, sampling, shelf
from rotationzoo.calibration.search.layer import LayerSearch
from rotationzoo.calibration.search.run import search_rotations
from rotationzoo.codec import int2
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.compositions import orthogonality_error
from rotationzoo.rotations import SIDES, Rotations


def assert_equal(rotations: Rotations, expected: Rotations) -> None:
    """The same tensors, bit for bit."""
    tensors, others = rotation_tensors(rotations), rotation_tensors(expected)
    assert set(tensors) == set(others)
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def check_steps(steps: dict[str, list[tuple[int, int]]]) -> None:
    """Every stage counts its steps from none to all, so that the time left can be told."""
    stages = ["choosing", "sampling", "searching", "comparing", "trimming", "testing"]
    assert list(steps) == stages
    assert steps["choosing"].pop(0) == (0, 0), "the exact model's answers are not counted"
    for stage, told in steps.items():
        total = told[-1][1]
        assert told[0] == (0, total), stage
        assert told[-1] == (total, total), stage
        assert told == sorted(told), stage


def test_a_search_chooses_for_every_head(task):
    steps: dict[str, list[tuple[int, int]]] = {}
    told = lambda stage, *step: steps.setdefault(stage, []).append(step)  # noqa: E731
    result = search_rotations(task, progress=told)
    check_steps(steps)
    rotations, record = result.rotations, result.record
    tensors, baseline = rotation_tensors(rotations), rotation_tensors(task.baseline)
    assert set(baseline) == set(tensors)
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (baseline[name].shape, baseline[name].dtype)
    for _, _, rotation in rotations.each():
        assert orthogonality_error(rotation.matrix) < 1e-6
    for side in SIDES:
        clips = torch.cat([sides[side].clip for sides in rotations.values()])
        assert set(clips.tolist()) == {record["model"][side]["clip"]}
        scores = [score for layer in record["layers"].values() for score in layer[side]["chosen"]]
        assert max(scores) <= 1 + 1e-6, "1 is what the recipe makes without a search"
        assert min(scores) < 0.9
    by_side = record["model"]["by_side"]
    assert record["model"]["kept"] in ("keys", "both")
    assert by_side["keys"] < 0.95 * by_side["own"]  # measured 0.91
    again = search_rotations(task).rotations
    assert_equal(again, rotations)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_centred_values_are_served_and_searched_without_their_mean(name):
    """What is stored is the rest: values that are their mean come back exact, sinks of attention or
    not."""
    model = architectures.build(name, **({"head_dim": 32} if name == "llama" else {}))
    recipe = search_recipe(steps=2, starts=1).model_copy(update={"center_values": True})
    task = task_for(model, recipe)
    result = search_rotations(task)
    rotations, record = result.rotations, result.record
    mean = task.statistics[0]["value"].mean.float()
    assert torch.equal(rotations[0].value.mean, mean)
    rows = mean[None, :, None].expand(1, -1, 5, -1)
    restored = Arm("best", rotations).fake_quantize(rows, 0, "value", int2.SGLANG)
    assert torch.allclose(restored, rows, atol=1e-6)
    uncentered = rotations.replace(lambda layer, side, rotation: replace(rotation, mean=None))
    restored = Arm("best", uncentered).fake_quantize(rows, 0, "value", int2.SGLANG)
    assert not torch.allclose(restored, rows, atol=1e-3)
    scores = [score for layer in record["layers"].values() for score in layer["value"]["chosen"]]
    assert max(scores) <= 1 + 1e-6


def test_choices_are_made_on_text_that_nothing_was_fitted_to(task, monkeypatch):
    texts = {}

    def spy(module, name, texts_of):
        function = getattr(module, name)

        def call(*arguments, **options):
            rows = [row.tolist() for row in texts_of(arguments)]
            texts.setdefault(name, []).extend(row for row in rows if row not in texts.get(name, ()))
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    spy(sampling, "draw_queries", lambda arguments: arguments[0].choosing)
    spy(sampling, "draw_rows", lambda arguments: arguments[0].fitted)
    spy(run, "search_clip", lambda arguments: arguments[0].divergence.texts)
    spy(run, "run_test", lambda arguments: arguments[0].divergence.texts)
    search_rotations(replace(task, held_out=ROWS[2:]))
    expected = {
        "draw_queries": ROWS[2:5],
        "draw_rows": ROWS[:4],
        "search_clip": ROWS[2:5],
        "run_test": ROWS[5:],
    }
    assert texts == {name: [row.tolist() for row in rows] for name, rows in expected.items()}


def test_layers_that_do_not_fit_in_memory_together_give_the_same(task, monkeypatch):
    whole = search_rotations(task).rotations
    one_by_one(monkeypatch)
    in_parts = search_rotations(task).rotations
    assert_equal(in_parts, whole)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_search_of_an_offloaded_model_is_planned_for_the_gpu_if_there_is_one(
    task, monkeypatch, gpu
):
    offloaded = replace(task, model=copy.deepcopy(task.model).to("meta"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert layers._footprint(offloaded).on_cpu is not gpu
    assert layers._footprint(task).on_cpu


def one_by_one(monkeypatch) -> None:
    """Search layer by layer, each with passes of its own."""
    monkeypatch.setattr(shelf, "free_memory", lambda device: 0)
    monkeypatch.setattr(memory, "_LEARNED_AT_ONCE_ON_CPU", 1)


def test_a_stopped_search_goes_on_with_the_layer_it_was_in(task, monkeypatch, tmp_path):
    result = search_rotations(task)
    whole, record = result.rotations, result.record
    tried: list[int] = []
    one_by_one(monkeypatch)
    monkeypatch.setattr(checkpoints, "_SHARE", 1e9)  # so that no save in between is due

    class Stopped(LayerSearch):
        def __init__(self, layer, *rest):
            super().__init__(layer, *rest)
            tried.append(layer.index)
            if tried == [0, 1, 2]:
                raise KeyboardInterrupt

    monkeypatch.setattr(layers, "LayerSearch", Stopped)

    def search_with_checkpoint(identity="one"):
        checkpoint = Checkpoint(tmp_path / "out.checkpoint.safetensors", {"job": identity})
        result = search_rotations(task, checkpoint=checkpoint)
        return (result.rotations, result.record), checkpoint

    with pytest.raises(KeyboardInterrupt):
        search_with_checkpoint()
    with pytest.raises(RotationZooError, match="is of another job: job differ"):
        search_with_checkpoint("another")
    (rotations, again), checkpoint = search_with_checkpoint()
    assert tried == [0, 1, 2, 2, 3], "what was done is not searched again"
    assert_equal(rotations, whole)
    assert again == record
    checkpoint.remove()
    assert not list(tmp_path.iterdir())


def test_a_search_may_start_from_a_recipe_without_statistics(task):
    """The Hadamard matrix as what others must beat."""
    recipe = task.recipe.model_copy(update={"composition": "hadamard", "center_keys": False})
    assert recipe.needs_statistics
    baseline = fit(None, recipe, task.geometry)
    result = search_rotations(replace(task, recipe=recipe, baseline=baseline))
    rotations, record = result.rotations, result.record
    assert set(rotation_tensors(rotations)) == set(rotation_tensors(baseline))
    scores = [score for layer in record["layers"].values() for score in layer["key"]["chosen"]]
    assert max(scores) <= 1 + 1e-6
    assert min(scores) < 0.9
