"""Hadamard matrices, the reversal of bits, and what rotations are composed of."""

from types import SimpleNamespace

import pytest
import torch
from scipy.linalg import hadamard as sylvester

from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.composition_table import COMPOSITIONS, needs_statistics
from rotationzoo.linalg.compositions import (
    bit_reversal,
    compose,
    data_free,
    eigenbasis,
    hadamard,
    permutation,
    recover_basis,
)
from rotationzoo.linalg.orthogonality import invert, orthogonality_error
from rotationzoo.linalg.transform_coding import decorrelate

DIMS = [64, 80, 112, 128, 192, 256]
AROUND_EIGENBASIS = [name for name in COMPOSITIONS if needs_statistics(name)]


def moment(dim, heads=2, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, 4 * dim, dim, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(0, -spread, dim, dtype=torch.float64)
    return x.mT @ x


@pytest.mark.parametrize("dim", DIMS)
def test_orthogonal_before_and_after_the_cast(dim):
    _, basis = eigenbasis(moment(dim))
    for name in AROUND_EIGENBASIS:
        rotation = compose(basis, name, group_size=16)
        assert orthogonality_error(rotation) < 1e-12  # measured 3e-15
        assert orthogonality_error(rotation.float()) < 1e-6  # measured 8e-8


def test_eigenvalues_ascend_and_signs_are_fixed():
    second = moment(64)
    eigenvalues, basis = eigenbasis(second)
    assert (eigenvalues.diff() >= 0).all()
    largest = basis.gather(-2, basis.abs().argmax(-2, keepdim=True))
    assert (largest > 0).all()
    assert torch.allclose(basis @ torch.diag_embed(eigenvalues) @ basis.mT, second, rtol=1e-10)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [160, 256])
def test_what_is_multiplied_comes_back(dim, threads, set_threads):
    """After an eigenbasis, MKL's LU factorization of a batch failed from 160 channels on."""
    set_threads(threads)
    made = decorrelate(moment(dim), moment(dim)).forward
    inverse = invert(made)
    # The other LAPACK calls that follow: of a random rotation and of a latent's.
    left, _, right = torch.linalg.svd(made[0].double())
    others = data_free(dim, "random", 0), left @ right
    # Measured: 2e-13 for the inverse, 4e-15 for the others.
    assert (made.double() @ inverse - torch.eye(dim)).abs().max() < 1e-10
    assert max(map(orthogonality_error, others)) < 1e-12


@pytest.mark.parametrize("diagonal", [0, 1e-12, torch.nan])
def test_a_matrix_without_an_inverse_is_refused(diagonal):
    singular = torch.ones(2, 8, 8, dtype=torch.float64) + diagonal * torch.eye(8)
    with pytest.raises(RotationZooError, match="has no inverse"):
        invert(singular)


@pytest.mark.parametrize("wrong", [0, 1e18])
def test_a_wrong_inverse_is_refused(wrong, monkeypatch):
    """What LAPACK returns without an error."""
    returned = SimpleNamespace(inverse=torch.full((2, 16, 16), wrong, dtype=torch.float64))
    monkeypatch.setattr(torch.linalg, "inv_ex", lambda matrices: returned)
    with pytest.raises(RotationZooError, match="has no inverse: its product is off by"):
        invert(moment(16))


def test_permutation_is_the_published_one():
    """Sorted descending, perm[br(i)] = sorted[i]; in closed form, perm[j] = D - 1 - br(j)."""
    eigenvalues = torch.arange(8).double()
    order = torch.argsort(eigenvalues, descending=True)
    reversal = [0, 4, 2, 6, 1, 5, 3, 7]
    perm = torch.zeros(8, dtype=torch.long)
    perm[reversal] = order
    assert torch.equal(permutation(8), torch.eye(8, dtype=torch.float64)[:, perm])
    assert perm.tolist() == [7 - reversal[j] for j in range(8)]


def test_compositions_list_their_factors_left_to_right():
    _, u = eigenbasis(moment(16, heads=1))
    u, h, p = u[0], hadamard(16), permutation(16)
    expected = {
        "plain": u,
        "br": u @ p,
        "r_h": u @ h,
        "r_h_pbr": u @ h @ p,
        "r_pbr_hblock": u @ p @ torch.block_diag(*[hadamard(4)] * 4),
    }
    assert set(expected) == set(AROUND_EIGENBASIS)
    for name, matrix in expected.items():
        assert torch.allclose(compose(u, name, group_size=4), matrix, atol=1e-14)
    data_free_matrices = {"hadamard": h, "identity": torch.eye(16, dtype=torch.float64)}
    for name, matrix in data_free_matrices.items():
        assert torch.equal(data_free(16, name, seed=0), matrix)


@pytest.mark.parametrize("name", AROUND_EIGENBASIS)
def test_the_basis_is_recovered_from_the_rotation(name):
    _, basis = eigenbasis(moment(96))
    assert torch.allclose(recover_basis(compose(basis, name, 32), name, 32), basis, atol=1e-13)


USED = [64, 80, 96, 112, 128, 160, 192, 224, 256, 512, 576]


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 28, 36, *USED])
def test_is_a_normalised_hadamard_matrix(order):
    matrix = hadamard(order)
    assert matrix.dtype == torch.float64
    assert (matrix.abs() * order**0.5 - 1).abs().max() < 1e-12
    error = matrix @ matrix.T - torch.eye(order, dtype=torch.float64)
    assert error.abs().max() < 1e-13  # measured 3e-15


@pytest.mark.parametrize("order", [64, 512])
def test_powers_of_two_are_in_natural_order(order):
    assert torch.equal(hadamard(order), torch.from_numpy(sylvester(order)).double() / order**0.5)


@pytest.mark.parametrize("order", [0, 3, 6, 92, 130])
def test_refuses_orders_out_of_reach(order):
    with pytest.raises(RotationZooError, match=str(order)):
        hadamard(order)


@pytest.mark.parametrize("order", [1, *USED])
def test_strongest_directions_land_in_distinct_groups(order):
    assert sorted(bit_reversal(order).tolist()) == list(range(order))
    group = 2
    while order % group == 0 and group < order:
        strongest = bit_reversal(order)[: order // group]
        assert len({int(position) // group for position in strongest}) == order // group
        group *= 2
