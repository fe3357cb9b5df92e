"""The perplexities of an evaluation, from numbers that can be added up by hand."""

import math

import pytest
import torch

from rotationzoo.evaluation.forward import Losses


def measured(losses: list[list[float]]) -> Losses:
    sums = Losses()
    for of_text in losses:
        sums.add(torch.tensor([of_text]))
    return sums


def test_an_arm_beside_the_exact_model():
    exact = measured([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    arm = measured([[1.0, 1.2, 1.4, 1.4], [2.0, 2.0, 2.6, 2.6]])
    report = arm.measure_arm(exact).model_dump()
    assert exact.measure_exact().text_tokens == [4, 4]
    assert exact.measure_exact().text_losses == [1, 2]
    assert report["perplexity"] == pytest.approx(math.exp(1.775))
    assert report["perplexity_increase"] == pytest.approx(math.expm1(0.275))
    # Texts lose 0.25 and 0.3: their mean is off by 0.025, and so is its logarithm.
    error = report["standard_error"]["perplexity_increase"]
    assert error == pytest.approx(math.exp(0.275) * 0.025, rel=1e-4)


def test_longer_texts_weigh_more_and_one_text_has_no_standard_error():
    exact, arm = measured([[1.0], [1.0, 1.0, 1.0]]), measured([[1.4], [1.0, 1.0, 1.0]])
    assert arm.measure_arm(exact).perplexity_increase == pytest.approx(math.expm1(0.1))
    report = measured([[1.0, 2.0]]).measure_arm(measured([[1.0, 1.0]]))
    assert report.standard_error == {"perplexity_increase": None}
