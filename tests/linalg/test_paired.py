import pytest
import torch

from rotationzoo.linalg.paired import paired_difference, weighted_mean


def test_texts_weigh_as_much_as_they_have_tokens():
    mean, error = paired_difference([2.0, 3.0, 9.0], [1.0, 1.0, 1.0], [300, 100, 0])
    assert mean == pytest.approx(1.25)
    assert error == pytest.approx(((0.75 * 0.25) ** 2 + (0.25 * 0.75) ** 2) ** 0.5 * 2**0.5)


def test_a_single_text_has_no_standard_error():
    assert weighted_mean(torch.tensor([2.0]), torch.tensor([7.0])) == (2.0, None)
