"""The figures of an evaluation, from numbers that can be added up by hand, and attention KL
beside plain attention computed query by query."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from support import architectures
from support.architectures import WINDOW
from support.models import attention_calls

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.measured import AboutArm
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.evaluation.arms import Arm
from rotationzoo.evaluation.forward import Trial, run_models
from rotationzoo.evaluation.metrics import Metrics, bucket_edges, bucket_members
from rotationzoo.model.geometry import geometry_of
from rotationzoo.progress import silent
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.simulation.rivals import RivalCodec, store_as_kivi

EDGES = bucket_edges(2, 6)


def test_buckets_end_at_powers_of_two():
    assert bucket_edges(320, 2048) == (320, 512, 1024, 2048)
    assert bucket_edges(0, 3) == (0, 1, 2, 3)
    assert bucket_edges(4, 6) == (4, 6), "the start is in the first bucket itself"


def test_a_position_is_in_one_bucket_and_those_outside_in_none():
    assert EDGES == (2, 4, 6)
    member = bucket_members(EDGES, torch.arange(8))
    assert member.int().tolist() == [[0, 0]] * 2 + [[1, 0]] * 2 + [[0, 1]] * 2 + [[0, 0]] * 2


def measured(losses: list[list[float]], **options) -> Metrics:
    """Of one layer whose block output is 3 where the exact is `exact`."""
    metrics = Metrics(EDGES, [0])
    metrics.add_losses(torch.tensor(losses))
    rows = len(losses)
    output = torch.full((rows, 6, 1), 3.0)
    metrics.add_output(0, output, torch.full((rows, 6, 1), options.get("exact", 3.0)))
    return metrics


def test_an_arm_beside_the_exact_model():
    """Four losses a text, from position 2 on: two in each bucket."""
    exact = measured([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    arm = measured([[1.0, 1.2, 1.4, 1.4], [2.0, 2.0, 2.6, 2.6]], exact=2.0)
    arm.add_kl(0, torch.tensor([[0.1, 0.3], [0.1, 0.3]]), torch.tensor([3, 5]))
    report = arm.measure_arm(exact).model_dump()
    assert exact.tokens == 8
    assert exact.measure_exact().text_losses == [1, 2]
    assert report["perplexity"] == pytest.approx(math.exp(1.775))
    assert report["perplexity_increase"] == pytest.approx(math.expm1(0.275))
    assert report["output_error"] == pytest.approx(0.5), "1 of 2"
    assert report["attention_kl"] == pytest.approx(0.2)
    # Texts lose 0.25 and 0.3: their mean is off by 0.025, and so is its logarithm.
    error = report["standard_error"]["perplexity_increase"]
    assert error == pytest.approx(math.exp(0.275) * 0.025, rel=1e-4)
    first, second = report["by_length"]
    assert (first["from"], first["to"], second["from"], second["to"]) == (2, 4, 4, 6)
    assert first["perplexity_increase"] == pytest.approx(math.expm1(0.05))
    assert second["perplexity_increase"] == pytest.approx(math.expm1(0.5))


def test_without_samples_or_a_second_text_there_is_no_figure():
    exact = measured([[1.0, 1.0, 1.0, 1.0]])
    report = measured([[1.0, 1.0, 1.0, 2.0]], exact=2.0).measure_arm(exact)
    assert report.attention_kl is None
    assert set(report.standard_error.values()) == {None}


def test_a_text_that_ends_before_a_bucket_has_no_weight_in_it():
    exact = Metrics(EDGES, [0])
    arm = Metrics(EDGES, [0])
    for metrics, losses in ((exact, (1.0, 1.0)), (arm, (1.5, 1.1))):
        for loss, length in zip(losses, (2, 4), strict=True):
            metrics.add_losses(torch.full((1, length), loss))
            output = torch.ones(1, 2 + length, 1)
            metrics.add_output(0, output, output)
    first, second = arm.measure_arm(exact).by_length
    assert first.perplexity_increase == pytest.approx(math.expm1(0.3))
    assert second.perplexity_increase == pytest.approx(math.expm1(0.1))


LAYER = 1
CACHE = CacheLayout(sink=2, recent=4)
# Two texts of different lengths, of which the first weighs more.
TEXTS = [
    torch.randint(3, 59, (1, length), generator=torch.Generator().manual_seed(length))
    for length in (24, 17)
]


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Rows as short as these would be compared in one block."""
    monkeypatch.setattr("rotationzoo.evaluation.metrics.COMPARED_TOKENS", 5)


def arms_of(geometry):
    rotations = fit(None, PRESETS["random"], geometry)
    kivi = RivalCodec(partial(store_as_kivi, tokens=4))
    codecs = {"random": RotatedCodec(rotations), "kivi": kivi}
    return [Arm(AboutArm(name=name, kind="baseline"), codec) for name, codec in codecs.items()]


def trial_of(model, **changes) -> Trial:
    """One layer in 2 bits, so that its input is that of the exact model; all queries compared."""
    geometry = geometry_of(model)
    arms = arms_of(geometry)
    start = CACHE.first_quantized
    trial = Trial(geometry, arms, [CACHE], [LAYER], queries=100, start=start)
    return replace(trial, **changes)


def measure_layer(model, trial: Trial, texts=TEXTS, arm="random"):
    """What is reported of an arm, of whose layers one is in 2 bits."""
    sums = run_models(model, texts, trial, silent)
    return sums.arms[CACHE, arm].measure_arm(sums.exact).model_dump()


def calls_of(model, texts=TEXTS):
    """Query, key and value `[H, T, D]` of the layer in the exact model, text by text, and what it
    returns, `[H_q, T, D]`."""
    return [[rows[0].double() for rows in call] for call in attention_calls(model, texts)[LAYER]]


def plain_kl(model, arm: Arm, window: int | None) -> float:
    """The definition, over all texts and queries past the start."""
    divergence, count, past = 0.0, 0, slice(CACHE.first_quantized, None)
    for query, key, *_ in calls_of(model):
        stored = arm.codec.fake_quantize(key[None].float(), LAYER, "key", CACHE.format)[0].double()
        group, position = len(query) // len(key), torch.arange(key.shape[1])
        distance = position[:, None] - position
        seen = (distance >= 0) & (distance < (window or len(position)))
        kept = (position < CACHE.sink) | (distance < CACHE.recent)
        for head, rows in enumerate(query):
            scores, stored_scores = (
                rows @ keys[head // group].mT / rows.shape[-1] ** 0.5 for keys in (key, stored)
            )
            p, q = (
                each.masked_fill(~seen, -math.inf).softmax(-1)
                for each in (scores, torch.where(kept, scores, stored_scores))
            )
            divergence += (p * (p / q).log())[past][seen[past]].sum().item()
        count += len(query) * len(position[past])
    return divergence / count


@pytest.mark.parametrize(("name", "window"), [("llama", None), ("mistral", WINDOW)])
def test_attention_beside_plain_attention(name, window):
    model = architectures.build(name)
    trial = trial_of(model)
    expected = plain_kl(model, trial.arms[0], window)
    # Measured: at most 2e-7 apart, because the model computes in float32.
    assert measure_layer(model, trial)["attention_kl"] == pytest.approx(expected, rel=1e-4)


def test_without_eager_attention_there_is_no_kl(monkeypatch):
    def none(module):
        raise AttributeError

    model = architectures.build("llama")
    monkeypatch.setattr("rotationzoo.model.capture.eager_attention", none)
    layer = measure_layer(model, trial_of(model))
    assert layer["attention_kl"] is None
    assert layer["output_error"] > 0
