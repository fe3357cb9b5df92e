"""What a comparison of a kernel with its definition finds, of results made up without a GPU."""

import pytest
import torch

from rotationzoo.checks.comparison import KernelComparison
from rotationzoo.errors import RotationZooError


@pytest.fixture
def comparison():
    return KernelComparison(group_size=None, on_gpu=False)


def test_the_smallest_difference_is_found_with_its_place(comparison):
    expected = torch.ones(2, 4, 8)
    comparison._check_equal("value", expected.clone(), expected)
    actual = expected.clone()
    actual[1, 2, 3] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    with pytest.raises(RotationZooError, match=r"head 1, row 2: the kernel's value is 1\.0000001"):
        comparison._check_equal("value", actual, expected)
    negative = torch.zeros(2, 4, 8).neg()
    with pytest.raises(RotationZooError, match=r"head 0, row 0: .* is -0\.0 .* \(64 differ\)"):
        comparison._check_equal("value", negative, torch.zeros(2, 4, 8))


@pytest.mark.parametrize("wrong", [1e-3, float("nan"), float("inf")])
def test_a_product_is_held_to_what_float32_allows(comparison, wrong):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 4, 16, generator=generator)
    matrix = torch.linalg.qr(torch.randn(2, 16, 16, generator=generator))[0]
    product = rows @ matrix
    comparison._check_product("rotation", product, rows, matrix)
    assert 0 < comparison.rotation_error < 1
    product[1, 3, 5] += wrong
    with pytest.raises(RotationZooError, match="head 1, row 3: the kernel's rotation is off by"):
        comparison._check_product("rotation", product, rows, matrix)
