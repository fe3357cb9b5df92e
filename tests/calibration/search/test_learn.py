"""Learning rotations: the loss falls where errors count."""

import time

import torch

from rotationzoo.calibration.search import learn
from rotationzoo.calibration.search.learn import LearningSettings, learn_rotations
from rotationzoo.calibration.search.straight_through import straight_through
from rotationzoo.codec import int2
from rotationzoo.linalg.compositions import data_free, orthogonality_error


def test_learning_turns_towards_what_is_stored_better():
    """Rows in which one channel towers: turned so that it is spread, they come back far better."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 256, 16, generator=generator)
    rows[..., 0] = 40 * rows[..., 0].sign()
    metric = torch.eye(16, dtype=torch.float64).expand(2, -1, -1)
    matrices = torch.stack([torch.eye(16), data_free(16, "random", 0).float()])
    start = matrices[:, None].expand(-1, 2, -1, -1).contiguous()
    clip = torch.ones(2, 2, 1, dtype=torch.float64)

    def codec(rotated: torch.Tensor) -> torch.Tensor:
        return straight_through(rotated, clip, None, int2.SGLANG)

    def error(matrix: torch.Tensor) -> torch.Tensor:
        restored = codec(rows @ matrix) @ matrix.mT
        return (restored - rows).square().sum((1, 2, 3)) / rows.square().sum()

    settings = LearningSettings(steps=80, rate=0.03)
    learned, curve = learn_rotations(rows, metric, start, codec, settings)
    assert (len(curve), len(curve[0])) == (80, 2)
    assert error(learned)[0] < 0.5 * error(start)[0]
    assert error(learned)[1] < error(start)[1]
    assert orthogonality_error(learned) < 1e-6
    again, _ = learn_rotations(rows, metric, start, codec, settings)
    assert torch.equal(again, learned), "the same seed, the same rotation"
    out_of_time = LearningSettings(steps=80, rate=0.03, deadline=time.monotonic() - 1)
    late, none = learn_rotations(rows, metric, start, codec, out_of_time)
    assert not none
    assert torch.allclose(late, start, atol=1e-6)


def test_learning_follows_the_metric():
    """What nobody reads may come back wrong: its error stays where that of the rest falls."""
    rows = torch.randn(1, 512, 16, generator=torch.Generator().manual_seed(0))
    rows *= torch.linspace(1, 4, 16)
    read = torch.ones(16, dtype=torch.float64)
    read[8:] = 1e-4
    start = data_free(16, "hadamard", 0).float()[None, None].contiguous()
    clip = torch.full((1, 1, 1), 0.9, dtype=torch.float64)

    def codec(rotated: torch.Tensor) -> torch.Tensor:
        return straight_through(rotated, clip, None, int2.SGLANG)

    def errors(matrix: torch.Tensor) -> torch.Tensor:
        return (codec(rows @ matrix) @ matrix.mT - rows).square().mean((0, 1, 2))

    settings = LearningSettings(steps=200, rate=0.02)
    learned, curve = learn_rotations(rows, torch.diag(read)[None], start, codec, settings)
    assert errors(learned)[:8].sum() < 0.8 * errors(start)[:8].sum()  # measured 0.70
    assert errors(learned)[8:].sum() > 0.9 * errors(start)[8:].sum()  # measured 0.95
    assert curve[-1][0] < 0.8 * curve[0][0]


def test_a_step_turns_and_does_not_stretch():
    """The Cayley transform of a skew-symmetric matrix is orthogonal, and the exponential to second
    order."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 16, 16, generator=generator) * 1e-2
    skew = drawn - drawn.mT
    step = learn._cayley(skew)
    assert orthogonality_error(step) < 1e-6  # measured 2e-7
    third_order = torch.linalg.matrix_norm(skew, 2) ** 3
    assert (torch.linalg.matrix_norm(step - torch.matrix_exp(skew), 2) < third_order).all()
