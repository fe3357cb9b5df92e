"""The choice of a rotation for each head."""

import torch

from rotationzoo.calibration.search.choice import Choice, choose_better, pick_by_head
from rotationzoo.linalg.paired import clearly_less


def test_better_means_by_more_than_a_standard_error():
    before = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    after = torch.tensor([[0.9, 0.5, 1.0], [0.9, 1.6, 1.0], [0.8, 1.1, 1.0], [0.9, 0.7, 1.0]])
    assert clearly_less(after, before).tolist() == [True, False, False]
    assert clearly_less(after[:1], before[:1]).tolist() == [True, True, False], (
        "one text has no error to show"
    )


def choice(name: str, value: float, scores: list[list[float]]) -> Choice:
    """Three heads with a 2 x 2 matrix of one number, scored on four texts."""
    return Choice(torch.full((3, 2, 2), value), [name] * 3, torch.tensor(scores))


def test_each_head_has_the_better_rotation():
    before = choice("before", 1.0, [[1.0, 1.0, 1.0]] * 4)
    after = choice(
        "after", 2.0, [[0.9, 0.5, 1.0], [0.9, 1.6, 1.0], [0.8, 1.1, 1.0], [0.9, 0.7, 1.0]]
    )
    chosen = choose_better(before, after)
    assert chosen.names == ["after", "before", "before"]
    assert chosen.matrix[:, 0, 0].tolist() == [2.0, 1.0, 1.0]
    assert torch.equal(chosen.scores[:, 0], after.scores[:, 0])
    assert torch.equal(chosen.scores[:, 1:], before.scores[:, 1:])
    picked = pick_by_head([before, after], torch.tensor([0, 1, 1]))
    assert picked.names == ["before", "after", "after"]
