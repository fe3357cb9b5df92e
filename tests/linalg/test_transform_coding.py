"""The basis of transform coding, and how bits are shared out."""

import itertools

import pytest
import torch

from rotationzoo.linalg.transform_coding import REMAINING, SEGMENT, WORD, decorrelate, share_bits


def random_moments(heads, dim, seed):
    rows = torch.randn(
        heads, 3 * dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    rows = rows * torch.logspace(0, -2, dim, dtype=torch.float64)
    return rows.mT @ rows / rows.shape[1]


def test_channels_do_not_correlate_and_errors_count_alike():
    covariance, metric = random_moments(2, 12, 0), random_moments(2, 12, 1)
    made = decorrelate(covariance, metric, damping=1e-9)
    channels = made.forward.mT @ covariance @ made.forward
    assert torch.allclose(channels, torch.diag_embed(made.deviations.square()), atol=1e-12)
    assert (made.deviations.diff() <= 0).all()
    size = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    inverse = torch.linalg.inv(made.forward)
    errors = inverse @ (metric / size) @ inverse.mT
    assert torch.allclose(errors, torch.eye(12, dtype=torch.float64).expand(2, -1, -1), atol=1e-6)
    # What is lost without any bits does not depend on the basis.
    lost = (metric * covariance).sum((-2, -1))
    assert torch.allclose(made.costs.sum(-1), lost, rtol=1e-6)


def test_a_head_that_nothing_reads_costs_nothing():
    metric = random_moments(2, 8, 1) * torch.tensor([1.0, 0.0])[:, None, None]
    made = decorrelate(random_moments(2, 8, 0), metric)
    assert made.forward.isfinite().all()
    first, second = share_bits([made.costs], 4.0)[0].sum(-1).tolist()
    assert second == 0 < first


def test_bits_are_spent_where_they_save_most():
    costs = torch.tensor([[9.0, 2.0, 0.5, 0.1]], dtype=torch.float64).repeat_interleave(4, -1)
    # A word of a row has seven segments of a bit; two have fifteen.
    (found,) = share_bits([costs], 4.0)

    def lost(widths):
        return sum(c * REMAINING[w] for c, w in zip(costs[0, ::4].tolist(), widths, strict=True))

    every = itertools.product(range(9), repeat=4)
    best = min((widths for widths in every if sum(widths) == 15), key=lost)
    assert tuple(found[0].tolist()) == best


@pytest.mark.parametrize("bits", [0.5, 1.75, 2.25, 3.0])
def test_a_budget_is_kept_in_whole_words(bits):
    generator = torch.Generator().manual_seed(2)
    costs = []
    for heads, dim in ((1, 64), (2, 64), (4, 128)):
        each = torch.rand(heads, dim, generator=generator).pow(8)
        costs.append(each.sort(descending=True).values)
    shares = share_bits(costs, bits)
    taken = torch.cat([SEGMENT * share.sum(-1) for share in shares])
    rows = torch.where(taken > 0, taken + SEGMENT, 0)
    assert not (rows % WORD).any()
    most = bits * sum(cost.numel() for cost in costs)
    assert most - WORD < rows.sum().item() <= most
    assert [share.shape[1] for share in shares] == [16, 16, 32]
    assert max(share.max().item() for share in shares) <= 8
    assert all((share.diff() <= 0).all() for share in shares), "the widest come first"


def test_no_channel_gets_more_than_eight_bits():
    (found,) = share_bits([torch.ones(1, 16)], 16.0)
    assert found.unique().tolist() == [8]
