"""Equalizers: both sides of a product get the same energy, and the product stays as it is."""

import pytest
import torch

from rotationzoo.linalg.equalization import CONDITION, fold_moments, key_factors, value_matrix
from rotationzoo.linalg.moments import Moment

HEADS, DIM = 3, 16
PARTNERS = torch.arange(DIM).roll(DIM // 2)  # the partner of j is j + 8
SHARED = (torch.arange(DIM) % (DIM // 2)).expand(HEADS, -1)
HALVES = SHARED + DIM * torch.arange(HEADS)[:, None]


def spread(decades: float, seed: int) -> torch.Tensor:
    """Random symmetric matrices `[HEADS, DIM, DIM]` with eigenvalues over so many decades."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(HEADS, DIM, DIM, dtype=torch.float64, generator=generator)
    basis = torch.linalg.qr(gaussian)[0]
    scales = torch.logspace(0, decades, DIM, dtype=torch.float64)
    return basis @ torch.diag_embed(scales.expand(HEADS, -1)) @ basis.mT


def energy(moment: torch.Tensor) -> torch.Tensor:
    """Of a channel and its partner together, `[HEADS, DIM]`."""
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    return diagonal + diagonal[:, PARTNERS]


def test_factors_give_queries_and_keys_the_same_energy_but_for_rounding():
    query, key = spread(3, 0), spread(5, 1)
    factors = key_factors(query, key, HALVES)
    octaves = (energy(key) * factors**2 / (energy(query) / factors**2)).log2()
    # An exponent is off by at most a half, and counts four times.
    assert (octaves.amax(1) - octaves.amin(1) <= 4).all()
    assert (energy(key) / energy(query)).log2().abs().max() > 4
    assert torch.equal(factors.log2(), factors.log2().round())
    assert torch.equal(factors, factors[:, PARTNERS])


def test_channels_that_are_nearly_alike_get_one_factor():
    """Wherever they lie between two powers of two; those that tower still get another."""
    generator = torch.Generator().manual_seed(0)
    for shift in torch.linspace(0, 1, 9, dtype=torch.float64):
        exponents = shift + 0.1 * torch.randn(HEADS, DIM // 2, generator=generator)
        exponents[:, 2] += 3
        widths = torch.exp2(exponents).repeat(1, 2).double()
        factors = key_factors(spread(0, 0), torch.diag_embed(widths**-4), HALVES)
        others = torch.arange(DIM) % (DIM // 2) != 2
        assert (factors[:, others] == factors[:, :1]).all()
        assert (factors[:, [2, 10]] == 8 * factors[:, :1]).all()


def test_heads_that_share_a_norm_share_factors():
    query, key = spread(1, 0), spread(5, 1)
    key[1, [2, 10], [2, 10]] *= 2**16  # which no other head has
    shared = key_factors(query, key, SHARED)
    assert torch.equal(shared, shared[:1].expand(HEADS, -1))
    pooled = key_factors(query.mean(0, keepdim=True), key.mean(0, keepdim=True), HALVES[:1])
    assert torch.equal(shared[:1], pooled)
    assert not torch.equal(shared, key_factors(query, key, HALVES))


def test_channels_without_energy_get_a_finite_factor():
    key = spread(1, 1)
    key[:, [2, 10]] = 0
    key[:, :, [2, 10]] = 0
    factors = key_factors(spread(1, 0), key, HALVES)
    assert torch.isfinite(factors).all()
    assert factors.max() <= 1024
    nothing = torch.zeros(HEADS, DIM, DIM)
    assert torch.isfinite(key_factors(nothing, nothing, HALVES)).all()


def test_values_get_the_energy_with_which_they_are_read():
    """The identity of the geometric mean, up to the factor that makes the determinant 1."""
    value, metric = spread(2, 0), spread(1, 1)
    matrix = value_matrix(value, metric)
    inverse = torch.linalg.inv(matrix)
    stored, read = matrix.mT @ value @ matrix, inverse @ metric @ inverse.mT
    stored, read = (side / side.norm(dim=(1, 2), keepdim=True) for side in (stored, read))
    assert (stored - read).norm(dim=(1, 2)).max() < 1e-12  # 1e-14 was measured
    assert torch.allclose(torch.linalg.det(matrix), torch.ones(HEADS, dtype=torch.float64))
    plain = (value / value.norm(dim=(1, 2), keepdim=True), metric / metric.norm())
    assert (plain[0] - plain[1]).norm() > 0.5


@pytest.mark.parametrize("decades", [1, 12, 40])
def test_the_condition_number_is_bounded(decades):
    value = spread(decades, 0)
    matrix = value_matrix(value, torch.linalg.inv(value))
    assert torch.isfinite(matrix).all()
    assert torch.linalg.cond(matrix).max() < 1.001 * CONDITION


def test_folded_moments_are_those_of_folded_rows():
    generator = torch.Generator().manual_seed(0)
    key = 2.0 ** torch.randint(-2, 3, (HEADS, DIM), generator=generator)
    value = value_matrix(spread(2, 0), spread(2, 1))
    undone = torch.linalg.inv(value).mT
    transforms = {
        "query": torch.diag_embed(1 / key.double()),
        "key": torch.diag_embed(key.double()),
        "output": value,
        "value": value,
        "projection": undone,
    }
    plain, expected = {}, {}
    for kind, transform in transforms.items():
        rows = torch.randn(HEADS, 50, DIM, dtype=torch.float64, generator=generator)
        plain[kind] = Moment.zeros(HEADS, DIM)
        expected[kind] = Moment.zeros(HEADS, DIM)
        plain[kind].add(rows)
        expected[kind].add(rows @ transform)
    folded = fold_moments(plain, key, value)
    for kind, moment in expected.items():
        for name in ("second", "first", "weight"):
            assert torch.allclose(getattr(folded[kind], name), getattr(moment, name)), (kind, name)
