import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard as sylvester

from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.hadamard import bit_reversal, hadamard

USED = [64, 80, 96, 112, 128, 160, 192, 224, 256, 512, 576]
# Orders whose Paley factor needs a field of prime power order: 28 = 27 + 1, 52 = 2 (25 + 1), 100 =
# 2 (49 + 1), 344 = 343 + 1.
PRIME_POWER = [28, 52, 100, 104, 344]


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 36, *USED, *PRIME_POWER])
def test_is_a_normalised_hadamard_matrix(order):
    matrix = hadamard(order)
    assert matrix.dtype == torch.float64
    assert (matrix.abs() * order**0.5 - 1).abs().max() < 1e-12
    error = matrix @ matrix.T - torch.eye(order, dtype=torch.float64)
    assert error.abs().max() < 1e-13  # measured 3e-15


@pytest.mark.parametrize("order", [64, 128, 256, 512])
def test_powers_of_two_are_in_natural_order(order):
    assert torch.equal(hadamard(order), torch.from_numpy(sylvester(order)).double() / order**0.5)


@pytest.mark.parametrize("order", [0, 3, 6, 92, 130])
def test_refuses_orders_out_of_reach(order):
    with pytest.raises(RotationZooError, match=str(order)):
        hadamard(order)


@given(st.integers(1, 600))
def test_bit_reversal_is_a_permutation(order):
    assert sorted(bit_reversal(order).tolist()) == list(range(order))


def test_bit_reversal_of_a_power_of_two_reverses_bits():
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert bit_reversal(128)[:5].tolist() == [0, 64, 32, 96, 16]


@pytest.mark.parametrize("order", USED)
def test_strongest_directions_land_in_distinct_groups(order):
    group = 2
    while order % group == 0 and group < order:
        strongest = bit_reversal(order)[: order // group]
        assert len({int(position) // group for position in strongest}) == order // group
        group *= 2
