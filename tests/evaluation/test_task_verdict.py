"""Which arms are said to answer more, by paired tests that are computed again by hand."""

import math

import pytest
from scipy import stats

from rotationzoo.evaluation.tasks.verdict import compare_answers, judge_answers
from rotationzoo.evaluation.verdict import mcnemar


def answered(correct: str, shift: float = 0.0, wobble: float = 0.01) -> dict:
    """Records of two tasks. The log probabilities of all answers are shifted, and those of every
    other one wobble."""
    logs = [-2.0 + shift + wobble * (i % 2) for i in range(len(correct))]
    half = len(correct) // 2
    return {
        "needles": {"correct": correct[:half], "log_probabilities": logs[:half]},
        "copy": {"correct": correct[half:], "log_probabilities": logs[half:]},
    }


def test_mcnemar_is_computed_from_the_pairs_that_differ():
    """Of 8 questions that one arm alone answers, 7 are the first's: 2 (8 + 1) / 2^8."""
    first, second = answered("1111" * 3 + "0001"), answered("1111" + "0000" + "1000" + "1001")
    paired = compare_answers(first, second, [4, 4, 4, 4])
    assert (paired["answered"], paired["other_answered"]) == (13, 7)
    assert (paired["only_arm"], paired["only_other"]) == (7, 1)
    assert paired["answers_p_value"] == pytest.approx(2 * (8 + 1) / 2**8)
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0


@pytest.mark.parametrize(("first", "second"), [(0, 1), (5, 0), (3, 4), (40, 60), (700, 500)])
def test_mcnemar_is_the_exact_binomial_test(first, second):
    expected = stats.binomtest(first, first + second).pvalue
    assert mcnemar(first, second) == pytest.approx(expected, rel=1e-12)


def test_log_probabilities_are_compared_by_prompts():
    """Three prompts of two, two and four questions: the standard error is that of their means."""
    logs = [-1.0, -2.0, -3.0, -3.0, -4.0, -4.0, -5.0, -5.0]
    zeros = {"copy": {"correct": "0" * 8, "log_probabilities": [0.0] * 8}}
    first = {"copy": {"correct": "0" * 8, "log_probabilities": logs}}
    paired = compare_answers(first, zeros, [2, 2, 4])
    assert paired["log_probability_difference"] == pytest.approx(-27 / 8)
    squares = [(0.25, -1.5), (0.25, -3.0), (0.5, -4.5)]
    variance = sum((share * (mean + 27 / 8)) ** 2 for share, mean in squares) * 3 / 2
    assert paired["standard_error"] == pytest.approx(math.sqrt(variance))
    even = compare_answers(first, zeros, [2, 2, 2, 2])
    expected = stats.ttest_1samp([-1.5, -3.0, -4.0, -5.0], 0)
    assert even["log_probability_p_value"] == pytest.approx(expected.pvalue)
    assert compare_answers(first, zeros, [8])["log_probability_p_value"] is None


def test_answers_decide_before_log_probabilities():
    """A few questions more are clear, and where they are not, the log probability may be."""
    arms = {
        "mine": answered("1" * 32),
        "fewer": answered("1" * 16 + "0" * 16, shift=1.0),
        "less likely": answered("1" * 32, shift=-1.0, wobble=0.02),
        "same": answered("1" * 31 + "0"),
    }
    verdict = judge_answers(arms, ["mine"], [4] * 8)
    outcomes = {row["other"]: row["outcome"] for row in verdict["comparisons"]}
    assert outcomes == {"fewer": "more", "less likely": "likelier", "same": "unclear"}
    line, method = verdict["words"]
    assert line.startswith("mine: answers clearly more than fewer (100% beside 50%, p 0.00012, -1")
    assert "; gives right answers clearly more probability than less likely (100% beside" in line
    assert "; no clear difference in answers from same (100% beside 97%, p 1, +0.00" in line
    assert "32 questions" in method
    assert "8 prompts" in method
    assert "Holm's correction for 6 tests" in method
    reverse = judge_answers(arms, ["fewer"], [4] * 8)
    assert {row["outcome"] for row in reverse["comparisons"]} == {"fewer"}
    _, method = judge_answers(arms, ["mine"], [32])["words"]
    assert method.endswith("Clear: McNemar's exact test, Holm's correction for 3 tests, 5%"), (
        "one prompt has no standard error"
    )


def test_p_values_are_corrected_for_all_tests():
    """One question in six is answered by one arm alone: p is 2 / 2^6 alone, too much among many."""
    arms = {"mine": answered("1" * 24), "other": answered("1" * 18 + "0" * 6)}
    more = {f"n{i}": answered("1" * 24) for i in range(4)}
    alone = judge_answers(arms, ["mine"], [4] * 6)["comparisons"][0]
    many = judge_answers(arms | more, ["mine"], [4] * 6)["comparisons"][0]
    assert alone["answers_p_value"] == pytest.approx(2 * 2 / 2**6)
    assert many["answers_p_value"] > alone["answers_p_value"]


def test_without_artifacts_nothing_is_said():
    verdict = judge_answers({"identity": answered("1010")}, [], [2, 2])
    assert verdict["words"] == verdict["comparisons"] == []
