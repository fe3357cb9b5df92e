"""Paired tests, which are computed again by hand: whether one arm clearly answers more."""

import numpy as np
import pytest
from scipy import stats

from rotationzoo.linalg.paired import holm, sign_flip


def test_several_tests_are_corrected_for():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_whole_prompts_are_flipped():
    """Gains of 3, 3 and 1 in three of four prompts: of the 8 signs, 2 have a sum of 7 or -7."""
    assert sign_flip([3, 3, 0, 1]) == 2 / 8
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
