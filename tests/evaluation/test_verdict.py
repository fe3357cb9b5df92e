"""Which arms an evaluation calls different, and that it does so only where the texts bear it
out."""

import math

import pytest
import torch
from scipy import stats
from support.reports import arm, exact

from rotationzoo.evaluation.verdict import holm, judge_window

TEXTS = 12


def judge(losses: dict[str, list[float]], judged: list[str], tokens: list[int]) -> dict:
    arms = {name: arm(name, each) for name, each in losses.items()}
    return judge_window(arms, judged, exact(tokens)).model_dump()


def drawn_losses(**shifts: float) -> dict[str, list[float]]:
    """By arm, losses of the same texts, shifted by so much and with noise drawn for the arm, whose
    mean is 0."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randn(TEXTS, generator=generator, dtype=torch.float64) + 3
    noise = {
        name: 0.01 * torch.randn(TEXTS, generator=generator, dtype=torch.float64) for name in shifts
    }
    return {
        name: (texts + shift + noise[name] - noise[name].mean()).tolist()
        for name, shift in shifts.items()
    }


def test_clear_differences_are_told_from_those_that_are_not():
    losses = drawn_losses(mine=0, worse=0.1, better=-0.1, same=0.001)
    verdict = judge(losses, ["mine"], [100] * TEXTS)
    clear = {row["other"]: row["clear"] for row in verdict["comparisons"]}
    assert clear == {"worse": True, "better": True, "same": False}
    signs = {row["other"]: row["log_perplexity_difference"] for row in verdict["comparisons"]}
    assert signs["worse"] < 0 < signs["better"]


def test_p_values_are_those_of_a_paired_t_test():
    losses = drawn_losses(mine=0, other=0.004)
    row = judge(losses, ["mine"], [7] * TEXTS)["comparisons"][0]
    expected = stats.ttest_rel(losses["mine"], losses["other"])
    statistic = row["log_perplexity_difference"] / row["standard_error"]
    assert statistic == pytest.approx(expected.statistic)
    assert row["p_value"] == pytest.approx(expected.pvalue)


def test_many_comparisons_are_corrected_for():
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([]) == []
    more = {f"n{i}": 0.0 for i in range(30)}
    alone, among_many = (
        judge(drawn_losses(mine=0, other=0.006, **arms), ["mine"], [1] * TEXTS)["comparisons"][0]
        for arms in ({}, more)
    )
    assert alone["other"] == among_many["other"] == "other"
    assert alone["p_value"] < among_many["p_value"]


@pytest.mark.hostile("values")
@pytest.mark.parametrize("losses", [[3.0], [3.0, 3.0], [math.nan, 3.0], [math.inf, 3.0]], ids=str)
def test_texts_that_give_no_error_give_no_verdict(losses):
    same = dict.fromkeys(("mine", "other"), losses)
    verdict = judge(same, ["mine"], [5] * len(losses))
    assert not any(row["clear"] for row in verdict["comparisons"])
    errors = [row["standard_error"] for row in verdict["comparisons"]]
    assert (errors == [None]) == (len(losses) == 1)
