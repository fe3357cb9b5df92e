"""Validating a kernel without a GPU: the rows, what a comparison finds, and what it adds to an
artifact; tests/codec/test_cuda.py has what needs a GPU."""

import shutil

import pytest
import torch
from support.command_line import only_error

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.kernel import KernelComparison, draw_rows, edge_rows, rows_of_each_type
from rotationzoo.codec import cuda, int2
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import Average
from rotationzoo.writer import add_files


def test_without_a_gpu_nothing_is_validated(inside, made, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = {path: path.read_bytes() for path in made.iterdir()}
    error = only_error(inside("validate", made))
    assert "is not validated: the CUDA reference needs an NVIDIA GPU" in error
    assert {path: path.read_bytes() for path in made.iterdir()} == before
    assert "is not an artifact" in only_error(inside("validate", "nowhere"))


def test_a_validation_is_shown_on_the_card(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "artifact")
    gpu = {"device": "NVIDIA H200", "rows": 1}
    add_files(Artifact.open(folder), {"validation.json": b"{}"}, {"validation": gpu})
    assert "On NVIDIA H200, `int2.cu` gave" in (folder / "README.md").read_text()


def test_the_smallest_difference_is_found_with_its_place():
    comparison, expected = KernelComparison(group_size=None), torch.ones(2, 4, 8)
    comparison._check_equal("value", expected.clone(), expected)
    actual = expected.clone()
    actual[1, 2, 3] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    with pytest.raises(RotationZooError, match=r"head 1, row 2: the kernel's value is 1\.0000001"):
        comparison._check_equal("value", actual, expected)
    negative = torch.zeros(2, 4, 8).neg()
    with pytest.raises(RotationZooError, match=r"head 0, row 0: .* is -0\.0 .* \(64 differ\)"):
        comparison._check_equal("value", negative, torch.zeros(2, 4, 8))


@pytest.mark.parametrize("wrong", [1e-3, float("nan"), float("inf")])
def test_a_product_is_held_to_what_float32_allows(wrong):
    comparison, generator = KernelComparison(group_size=None), torch.Generator().manual_seed(0)
    rows = torch.randn(2, 4, 16, generator=generator)
    matrix = torch.linalg.qr(torch.randn(2, 16, 16, generator=generator))[0]
    product = rows @ matrix
    comparison._check_product("rotation", product, rows, matrix)
    assert 0 < comparison.rotation_error < 1
    product[1, 3, 5] += wrong
    with pytest.raises(RotationZooError, match="head 1, row 3: the kernel's rotation is off by"):
        comparison._check_product("rotation", product, rows, matrix)


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
