"""Recipes with transform coding: the artifact, and how caches and checks use it."""

from dataclasses import replace

import pytest
import torch
from support import architectures
from support.caches import (
    cache_for,
    distance,
    random_arm,
    read_in_calls,
    simulate,
    with_means,
    with_transforms,
)
from support.float64 import CLOSE, float64  # noqa: F401
from support.jobs import SMALL, job
from support.models import save_family

from rotationzoo import api
from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.reductions import Request, list_reductions, settle_request
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget, EvenBudget
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.soundness import check
from rotationzoo.checks.verify import verify
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.codec.formats import SGLANG
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.size import codec_bits
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.rungs import find_rungs, write_rung
from rotationzoo.linalg.moments import covariance, sums
from rotationzoo.linalg.transform_coding import SEGMENT
from rotationzoo.recipe.loading import PRESETS, from_dict, with_budget
from rotationzoo.settings import CalibrationSettings
from rotationzoo.sides import metric_kind

BITS = 3.0
RECIPE = with_budget(
    PRESETS["transform"].model_copy(update={"data": SMALL, "sink": 4, "recent": 6}), Budget(BITS)
)
WINDOWS = CacheLayout(SGLANG, sink=4, recent=8)
IDS = torch.randint(3, 59, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Artifact:
    """An artifact of a tiny model with a soft cap and windows, which no test may change."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_family("gemma2", folder)
    return calibrate(job(folder, tmp_path_factory.mktemp("transform"), RECIPE))


def stored_bits(artifact: Artifact, rotations) -> float:
    codec = RotatedCodec(rotations, rounding="transform")
    return codec_bits(artifact.geometry, codec, CacheLayout(sink=0, recent=0), 1000)


def test_channels_do_not_correlate_and_errors_cost_their_squares(made):
    assert verify(made).problems == []
    for layer, side, rotation in made.rotations.each():
        average = made.statistics[layer][side]
        # The soft cap needs the means of keys.
        assert (rotation.mean is None) == (side == "key")
        spread = average.second_moment
        if side == "value":
            spread = covariance(spread, average.mean)
        basis = rotation.transform.double()
        in_channels = basis.mT @ spread @ basis
        variances = rotation.deviations.double().square()
        off = in_channels - torch.diag_embed(variances)
        assert off.abs().max() <= 1e-6 * variances.max()
        metric = made.statistics[layer][metric_kind(side)].second_moment
        # Without damping, the loss without bits is the trace of their product.
        lost = (metric * spread).sum((-2, -1))
        assert torch.allclose(rotation.costs.sum(-1), lost, rtol=0.2)


def test_bits_can_be_spent_again_without_a_model(made, tmp_path):
    assert BITS - 0.1 < stored_bits(made, made.rotations) <= BITS
    fewer = spend_bits(made.rotations, Budget(1.75))
    assert 1.65 < stored_bits(made, fewer) <= 1.75
    again = spend_bits(fewer, Budget(BITS))
    for layer, side, rotation in again.each():
        assert torch.equal(rotation.widths, made.rotations[layer][side].widths)
    keys = spend_bits(made.rotations, Budget(key_bits=3.5, value_bits=1.5))
    even = spend_bits(made.rotations, EvenBudget(2.0))
    for layer, side, _ in keys.each():
        rows = RotatedCodec(keys, rounding="transform").segments(layer, side)
        assert rows.heads == len(made.rotations[layer][side].clip)
        of_layer = RotatedCodec(even, rounding="transform").segments(layer, side)
        elements = of_layer.heads * of_layer.dim
        assert 2.0 * elements - 32 < 8 * sum(of_layer.row_bytes) <= 2.0 * elements
    rungs = find_rungs([made.folder])
    assert [rung.bits for rung in rungs] == [2.0, 2.25, 2.5, 3.0, 3.5, 4.0]
    other = write_rung(made, rungs[0], "fewer")
    assert verify(other).problems == []
    assert other.recipe.bits == 2.0


def damaged(made: Artifact, **tensors) -> str:
    """The problems of an artifact with other tensors for the keys of its first layer."""

    def change(layer, side, rotation):
        if (layer, side) != (0, "key"):
            return rotation
        return replace(rotation, **{name: made_of(rotation) for name, made_of in tensors.items()})

    rotations = made.rotations.replace(change)
    return "; ".join(check(rotations, made.statistics, made.content).problems)


def test_tensors_that_contradict_the_statistics_are_problems(made):
    turned = damaged(made, transform=lambda its: its.transform.roll(1, -1))
    assert "key transform not that of the statistics: layer 0" in turned
    assert "not that of the statistics" in damaged(made, costs=lambda its: 2 * its.costs)
    wide = damaged(made, widths=lambda its: torch.full_like(its.widths, 8))
    assert "wider channels than 3 bits buy: layer 0" in wide
    rising = damaged(made, widths=lambda its: its.widths.flip(-1))
    assert "key widths not descending, from 8 bits to 0: layer 0" in rising
    negative = damaged(made, costs=lambda its: its.costs - 1)
    assert "key costs below 0: layer 0" in negative


def test_engines_with_other_codes_take_the_rotations(made):
    request = settle_request(made, Request("sglang", made.folder))
    assert "nearest codes instead of transform coding" in list_reductions(made, request)
    for layer, side, rotation in fit(sums(made.statistics), RECIPE, made.geometry).each():
        assert torch.equal(rotation.matrix, made.rotations[layer][side].matrix)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_cache_reads_what_the_simulation_reads(name, float64):  # noqa: F811
    model = architectures.build(name, torch.float64)
    arm = random_arm(model)
    rotations = with_transforms(with_means(arm.rotations))
    arm = replace(arm, rotations=rotations, rounding="transform")
    simulated = simulate(model, arm, WINDOWS, IDS)
    read = read_in_calls(model, cache_for(model, arm, WINDOWS), IDS, 1)
    assert distance(read, simulated) <= CLOSE
    nearest = replace(arm, rounding="nearest")
    assert distance(simulate(model, nearest, WINDOWS, IDS), simulated) > 0.01


def test_a_budget_and_transform_coding_need_each_other():
    recipe = PRESETS["transform"]
    for changes in ({"bits": None}, {"transform": False}, {"extends": "oscar", "bits": 2.5}):
        with pytest.raises(RotationZooError, match="transform coding need each other"):
            from_dict({"extends": "transform", **changes}, "a file")
    with pytest.raises(UsageError, match="more than 1 and at most 4 bits"):
        with_budget(recipe, Budget(5))
    with pytest.raises(RotationZooError, match="draws needs transform: true and metric: fisher"):
        from_dict({"extends": "attention", "draws": 6}, "a file")
    of_file = from_dict({"extends": "transform", "key_bits": 3, "value_bits": 2.5}, "the file")
    assert of_file.bits is None
    chosen = with_budget(of_file, Budget(2.25))
    assert [chosen.bits, chosen.key_bits, chosen.value_bits] == [2.25, None, None]
    assert "transform" not in PRESETS["oscar"].published(), "whose hash is published"
    assert "metric" not in recipe.published()
    assert SEGMENT == 4, "docs/codec.md says so"


def test_the_default_has_a_budget_that_options_and_engines_leave_out():
    def planned(**options):
        recipe = api.calibration_job(CalibrationSettings("demo", **options)).recipe
        return recipe.name, recipe.bits

    assert planned() == planned(engine="vllm") == ("transform", 2.5)
    assert planned(quick=True) == planned(engine="sglang") == ("oscar", None)
    assert planned(quick=True, engine="llama.cpp") == ("oscar-v1", None)
    assert planned(recipe="attention") == ("attention", 3.0)
    assert planned(bits=2.25) == ("transform-2.25-bits", 2.25)
    with pytest.raises(UsageError, match="a quick calibration has a recipe of its own"):
        planned(quick=True, bits=2.5)
    with pytest.raises(UsageError, match="need each other"):
        planned(engine="sglang", bits=2.5)


def test_recipes_with_error_feedback_are_refused(made):
    """They were published before transform coding."""
    content = made.content | {"recipe": made.content["recipe"] | {"feedback": True}}
    with pytest.raises(RotationZooError, match="the recipe has error feedback") as raised:
        check(made.rotations, made.statistics, content)
    assert raised.value.hint == "calibrate again: rotationzoo calibrate MODEL"
