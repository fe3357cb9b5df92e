"""The rows that a kernel is validated on."""

import torch

from rotationzoo.checks.comparison import draw_rows, edge_rows, rows_of_each_type
from rotationzoo.codec import cuda, int2
from rotationzoo.linalg.moments import Average


def test_drawn_rows_have_the_moments_and_heavy_tails():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(2, 16, 16, generator=generator, dtype=torch.float64)
    mean = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    covariance = root @ root.mT
    moments = Average(covariance + mean[:, :, None] * mean[:, None], mean)
    rows = draw_rows(moments, 2, 20000, 16, seed=1).double()
    assert (rows.median(1).values - mean).abs().max() < 0.1 * root.norm(dim=-1).max()
    scatter = (rows - mean[:, None]).mT @ (rows - mean[:, None])
    for head in range(2):
        drawn = scatter[head] / scatter[head].trace()
        expected = covariance[head] / covariance[head].trace()
        assert (drawn - expected).norm() < 0.1 * expected.norm()
    lengths = (rows - mean[:, None]).norm(dim=-1)
    assert lengths.max() > 20 * lengths.median()


def test_the_same_seed_draws_the_same_rows():
    rows = draw_rows(None, 1, 8, 16, seed=3)
    assert torch.equal(rows, draw_rows(None, 1, 8, 16, seed=3))
    assert not torch.equal(rows, draw_rows(None, 1, 8, 16, seed=4))


def test_edge_rows_reach_the_border_and_no_further():
    assert edge_rows(64, 1e18).abs().max() == 1e18
    rows = torch.full((2, 3, 64), 1e30)
    types = set()
    for typed in rows_of_each_type(rows):
        types.add(typed.dtype)
        assert typed.shape == (2, 8 + 3, 64)
        assert typed.isfinite().all()
        assert typed.double().abs().max() <= int2.LARGEST
    assert types == set(cuda.TYPES)
