"""Which arms an evaluation calls different, and which are said to answer more: only where texts and
prompts bear it out, by tests that are computed again by hand."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from support.reports import arm, exact, recall

from rotationzoo.artifact.scores import LengthScore
from rotationzoo.evaluation import verdict
from rotationzoo.evaluation.verdict import holm, judge_window, sign_flip
from rotationzoo.report.tables import comparison_table

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


def test_what_feedback_adds_is_paired():
    """Whatever the arms are called."""
    made = {"kind": "artifact", "artifact": "a" * 64}
    arms = {
        "a": arm("a", [2.0, 3.0], **made),
        "b": arm("b", [1.0, 1.0], kind="artifact", artifact="b" * 64),
        "a+pooled": arm("a+pooled", [5.0, 5.0], pooled=True, **made),
        "c": arm("c", [1.9, 2.7], rounding="feedback", **made),
    }
    verdict = judge_window(arms, ["a"], exact([100, 100]))
    assert [row.other for row in verdict.comparisons] == ["b", "a+pooled"]
    (added,) = verdict.feedback
    assert (added.arm, added.answers) == ("c", None)
    assert added.log_perplexity_difference == pytest.approx(-0.2)
    assert added.standard_error == pytest.approx(0.1)
    assert comparison_table(verdict, {}).rows[-1][-2] == "-0.2000 ±0.1000"


def answered(correct: str, shift: float = 0.0, wobble: float = 0.01) -> dict:
    """Records of two tasks. The log probabilities of all answers are shifted, and those of every
    other one wobble."""
    logs = [-2.0 + shift + wobble * (i % 2) for i in range(len(correct))]
    half = len(correct) // 2
    return {
        "needles": recall(correct[:half], logs[:half]),
        "copy": recall(correct[half:], logs[half:]),
    }


def by_task(prompts: list[int], tasks: dict) -> dict:
    """The exact model's tasks, with the prompts of these sizes whose questions they hold."""
    sizes, left = {}, iter(prompts)
    for task, each in tasks.items():
        sizes[task] = []
        while sum(sizes[task]) < len(each.correct):
            sizes[task].append(next(left))
    return exact([], sizes).tasks


def compare_answers(first: dict, second: dict, prompts: list[int]) -> dict:
    return verdict.compare_answers(first, second, by_task(prompts, first)).model_dump()


def judge_answers(arms: dict, judged: list[str], prompts: list[int]) -> dict:
    tasks = by_task(prompts, next(iter(arms.values())))
    return verdict.judge_answers(arms, judged, tasks).model_dump()


def test_whole_prompts_are_flipped():
    """Gains of 3, 3 and 1 in three prompts: of the 8 signs, 2 have a sum of 7 or -7."""
    first, second = answered("1111" * 3 + "0001"), answered("1111" + "0001" + "1000" + "0000")
    paired = compare_answers(first, second, [4, 4, 4, 4])
    assert (paired["answered"], paired["other_answered"]) == (13, 6)
    assert (paired["only_arm"], paired["only_other"]) == (7, 0)
    assert paired["answers_p_value"] == 2 / 8
    assert sign_flip([]) == sign_flip([0, 0]) == sign_flip([2, -2]) == 1.0


@pytest.mark.parametrize("gains", [[3, -1, 2, 2, 0, 1], [5, 5, -4, 1, 1, 1, 2, -3, 4, 0, 2]])
def test_the_distribution_is_that_of_all_signs(gains):
    expected = stats.permutation_test(
        (gains,), np.sum, permutation_type="samples", n_resamples=np.inf
    )
    assert sign_flip(gains) == pytest.approx(expected.pvalue)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (5, 0), (3, 4), (40, 60), (700, 500)])
def test_with_one_question_a_prompt_it_is_mcnemars_exact_test(first, second):
    expected = stats.binomtest(first, first + second).pvalue
    assert sign_flip([1] * first + [-1] * second) == pytest.approx(expected, rel=1e-9)


def test_log_probabilities_are_compared_by_prompts():
    """Three prompts of two, two and four questions: the standard error is that of their means."""
    logs = [-1.0, -2.0, -3.0, -3.0, -4.0, -4.0, -5.0, -5.0]
    zeros = {"copy": recall("0" * 8, [0.0] * 8)}
    first = {"copy": recall("0" * 8, logs)}
    paired = compare_answers(first, zeros, [2, 2, 4])
    assert paired["log_probability_difference"] == pytest.approx(-27 / 8)
    squares = [(0.25, -1.5), (0.25, -3.0), (0.5, -4.5)]
    variance = sum((share * (mean + 27 / 8)) ** 2 for share, mean in squares) * 3 / 2
    assert paired["standard_error"] == pytest.approx(math.sqrt(variance))
    even = compare_answers(first, zeros, [2, 2, 2, 2])
    expected = stats.ttest_1samp([-1.5, -3.0, -4.0, -5.0], 0)
    assert even["log_probability_p_value"] == pytest.approx(expected.pvalue)
    assert compare_answers(first, zeros, [8])["log_probability_p_value"] is None


def test_of_arms_that_are_asked_less_the_shared_questions_are_compared():
    """Two lengths, of which the second arm answered the first four of eight questions each."""
    lengths = {"length": 0, "answered": 0, "log_probability": 0.0}
    eight, four = ([LengthScore(questions=count, **lengths)] * 2 for count in (8, 4))
    whole = recall("11110000" * 2, [-1.0] * 16).model_copy(update={"by_length": eight})
    short = recall("0100" * 2, [-2.0] * 8).model_copy(update={"by_length": four})
    tasks = exact([], {"copy": [2] * 8}).tasks
    paired = verdict.compare_answers({"copy": whole}, {"copy": short}, tasks)
    assert (paired.answered, paired.other_answered, paired.only_other) == (8, 2, 0)
    assert paired.log_probability_difference == 1
    cut = recall("1111" * 2, [-1.0] * 8).model_copy(update={"by_length": four})
    tasks = exact([], {"copy": [2] * 4}).tasks
    assert paired == verdict.compare_answers({"copy": cut}, {"copy": short}, tasks)


def test_answers_decide_before_log_probabilities():
    """A few questions more are clear, and where they are not, the log probability may be."""
    arms = {
        "mine": answered("1" * 32),
        "fewer": answered("1" * 16 + "0" * 16, shift=1.0),
        "less likely": answered("1" * 32, shift=-1.0, wobble=0.02),
        "same": answered("1" * 31 + "0"),
    }
    judged = judge_answers(arms, ["mine"], [1] * 32)
    outcomes = {row["other"]: row["outcome"] for row in judged["comparisons"]}
    assert outcomes == {"fewer": "more", "less likely": "likelier", "same": "unclear"}
    assert (judged["questions"], judged["prompts"]) == (32, 32)
    reverse = judge_answers(arms, ["fewer"], [1] * 32)
    assert {row["outcome"] for row in reverse["comparisons"]} == {"fewer"}


def test_p_values_are_corrected_for_all_tests():
    """One question in six is answered by one arm alone: p is 2 / 2^6 alone, too much among many."""
    arms = {"mine": answered("1" * 24), "other": answered("1" * 18 + "0" * 6)}
    more = {f"n{i}": answered("1" * 24) for i in range(4)}
    alone = judge_answers(arms, ["mine"], [1] * 24)["comparisons"][0]
    many = judge_answers(arms | more, ["mine"], [1] * 24)["comparisons"][0]
    assert alone["answers_p_value"] == pytest.approx(2 * 2 / 2**6)
    assert many["answers_p_value"] > alone["answers_p_value"]


def test_without_artifacts_nothing_is_said():
    judged = judge_answers({"identity": answered("1010")}, [], [2, 2])
    assert judged["comparisons"] == []
