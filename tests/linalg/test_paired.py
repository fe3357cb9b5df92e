import pytest
import torch

from rotationzoo.linalg.paired import clearly_less, paired_difference, weighted_mean


def test_texts_weigh_as_much_as_they_have_tokens():
    mean, error = paired_difference([2.0, 3.0, 9.0], [1.0, 1.0, 1.0], [300, 100, 0])
    assert mean == pytest.approx(1.25)
    assert error == pytest.approx(((0.75 * 0.25) ** 2 + (0.25 * 0.75) ** 2) ** 0.5 * 2**0.5)


def test_a_single_text_has_no_standard_error():
    assert weighted_mean(torch.tensor([2.0]), torch.tensor([7.0])) == (2.0, None)
    assert clearly_less(torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 2.0]])).tolist() == [
        True,
        False,
    ]


def test_less_by_less_than_a_standard_error_is_not_clear():
    before = torch.zeros(4, 2)
    after = torch.tensor([[-1.0, -4.0], [-1.1, 4.0], [-0.9, -4.0], [-1.0, 3.0]])
    assert clearly_less(after, before).tolist() == [True, False]
