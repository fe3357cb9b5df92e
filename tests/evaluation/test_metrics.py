"""The figures of an evaluation, from numbers that can be added up by hand."""

import math

import pytest
import torch

from rotationzoo.evaluation.metrics import Buckets, Metrics

BUCKETS = Buckets.between(2, 6)


def test_buckets_end_at_powers_of_two():
    assert Buckets.between(320, 2048).ranges == [(320, 512), (512, 1024), (1024, 2048)]
    assert Buckets.between(0, 3).ranges == [(0, 1), (1, 2), (2, 3)]
    assert Buckets.between(4, 6).ranges == [(4, 6)], "the start is in the first bucket itself"


def test_a_position_is_in_one_bucket_and_those_outside_in_none():
    assert BUCKETS.ranges == [(2, 4), (4, 6)]
    member = BUCKETS.one_hot(torch.arange(8))
    assert member.int().tolist() == [[0, 0]] * 2 + [[1, 0]] * 2 + [[0, 1]] * 2 + [[0, 0]] * 2


def measured(losses: list[list[float]], **options) -> Metrics:
    """Of one layer whose block output is 3 where the exact is `exact`."""
    metrics = Metrics(BUCKETS, [0])
    metrics.add_losses(torch.tensor(losses))
    rows = len(losses)
    output = torch.full((rows, 6, 1), 3.0)
    metrics.add_output(0, output, torch.full((rows, 6, 1), options.get("exact", 3.0)))
    return metrics


def test_an_arm_beside_the_exact_model():
    """Four losses a text, from position 2 on: two in each bucket."""
    exact = measured([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    arm = measured([[1.0, 1.2, 1.4, 1.4], [2.0, 2.0, 2.6, 2.6]], exact=2.0)
    arm.add_kl(0, torch.tensor([[[0.1, 0.3]], [[0.1, 0.3]]]), torch.tensor([3, 5]))
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
    assert (first["attention_kl"], second["attention_kl"]) == pytest.approx((0.1, 0.3))
    [layer] = report["by_layer"]
    heads = layer.pop("heads")
    assert layer == {"layer": 0, "output_error": 0.5, "attention_kl": pytest.approx(0.2)}
    assert heads["attention_kl"] == pytest.approx([0.2])


def test_without_samples_or_a_second_text_there_is_no_figure():
    exact = measured([[1.0, 1.0, 1.0, 1.0]])
    report = measured([[1.0, 1.0, 1.0, 2.0]], exact=2.0).measure_arm(exact)
    assert report.attention_kl is None
    assert set(report.standard_error.values()) == {None}


def test_a_text_that_ends_before_a_bucket_has_no_weight_in_it():
    exact = Metrics(BUCKETS, [0])
    arm = Metrics(BUCKETS, [0])
    for metrics, losses in ((exact, (1.0, 1.0)), (arm, (1.5, 1.1))):
        for loss, length in zip(losses, (2, 4), strict=True):
            metrics.add_losses(torch.full((1, length), loss))
            output = torch.ones(1, 2 + length, 1)
            metrics.add_output(0, output, output)
    first, second = arm.measure_arm(exact).by_length
    assert first.perplexity_increase == pytest.approx(math.expm1(0.3))
    assert second.perplexity_increase == pytest.approx(math.expm1(0.1))
    assert second.standard_error["perplexity_increase"] is None, "a single text is left"
