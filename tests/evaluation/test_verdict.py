"""Which arms are said to answer more: only where prompts bear it out, by tests that are computed
again by hand."""

import math
from dataclasses import asdict

import numpy as np
import pytest
from scipy import stats
from support.reports import exact, recall

from rotationzoo.evaluation import verdict
from rotationzoo.evaluation.verdict import holm, sign_flip


def test_several_tests_are_corrected_for():
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([]) == []


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
    return asdict(verdict.compare_answers(first, second, by_task(prompts, first)))


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


def test_answers_decide_before_log_probabilities():
    """A few questions more are clear, and where they are not, the log probability may be."""
    mine = answered("1" * 32)
    others = {
        "more": answered("1" * 16 + "0" * 16, shift=1.0),
        "likelier": answered("1" * 32, shift=-1.0, wobble=0.02),
        "unclear": answered("1" * 31 + "0"),
    }
    tasks = by_task([1] * 32, mine)
    for outcome, other in others.items():
        paired = verdict.compare_answers(mine, other, tasks)
        assert (paired.outcome, paired.questions) == (outcome, 32)
    assert verdict.compare_answers(others["more"], mine, tasks).outcome == "fewer"
