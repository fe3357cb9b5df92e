"""Second moments, also in runs of float32 products, and paired tests."""

import numpy as np
import pytest
import torch
from scipy import stats
from support.memory import allocated

from rotationzoo.linalg import moments
from rotationzoo.linalg.moments import Moment, add_runs, rows_of_heads, run_bytes
from rotationzoo.linalg.paired import holm, paired_difference, sign_flip


def rows(seed, heads=2, count=50, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, count, dim, generator=generator, dtype=dtype)


def moment_of(x):
    moment = Moment.zeros(x.shape[0], x.shape[-1])
    moment.add(x)
    return moment


def test_second_moment_and_mean():
    x = rows(0)
    moment = moment_of(x)
    expected = torch.einsum("hnd,hne->hde", x, x) / 50
    assert torch.allclose(moment.second_moment, expected, rtol=1e-14, atol=1e-15)
    assert torch.allclose(moment.mean, x.mean(1), rtol=1e-14, atol=1e-15)
    assert torch.equal(moment.second_moment, moment.second_moment.mT)


def test_products_are_formed_in_float64():
    """A direction ten thousand times weaker than the rest survives."""
    basis, _ = torch.linalg.qr(rows(2, heads=1, count=8))
    scales = torch.tensor([1e3] * 7 + [1e-1], dtype=torch.float64)
    x = rows(3, heads=1, count=4096) * scales @ basis.mT
    x32 = x.float()
    expected = torch.linalg.eigvalsh(x32.double().mT @ x32.double() / 4096)[0, 0]
    smallest = torch.linalg.eigvalsh(moment_of(x32).second_moment)[0, 0]
    assert abs(smallest / expected - 1) < 1e-6
    in_float32 = torch.linalg.eigvalsh((x32.mT @ x32 / 4096).double())[0, 0]
    assert abs(in_float32 / expected - 1) > 1e-2


def test_texts_weigh_as_much_as_they_have_tokens():
    mean, error = paired_difference([2.0, 3.0, 9.0], [1.0, 1.0, 1.0], [300, 100, 0])
    assert mean == pytest.approx(1.25)
    assert error == pytest.approx(((0.75 * 0.25) ** 2 + (0.25 * 0.75) ** 2) ** 0.5 * 2**0.5)


# ---- paired tests, which are computed again by hand: whether one arm clearly answers more


def test_several_tests_are_corrected_for():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_whole_prompts_are_flipped():
    """Gains of 3, 3 and 1 in three of four prompts: of the 8 signs, 2 have a sum of 7 or -7."""
    assert sign_flip([3, 3, 0, 1]) == 2 / 8
    assert sign_flip([]) == sign_flip([0, 0]) == sign_flip([2, -2]) == 1.0


@pytest.mark.parametrize("gains", [[3, -1, 2, 2, 0, 1], [5, 5, -4, 1, 1, 1, 2, -3, 4, 0, 2]])
def test_the_distribution_is_that_of_all_signs(gains):
    expected = stats.permutation_test(
        (gains,), np.sum, permutation_type="samples", n_resamples=np.inf
    )
    assert sign_flip(gains) == pytest.approx(expected.pvalue)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (5, 0), (3, 4), (40, 60), (700, 500)])
def test_with_one_question_a_prompt_it_is_mcnemars_exact_test(first, second):
    expected = stats.binomtest(first, first + second).pvalue
    assert sign_flip([1] * first + [-1] * second) == pytest.approx(expected, rel=1e-9)


# ---- runs of float32 products


TYPES = [torch.bfloat16, torch.float16]


def uneven_rows(seed, heads=2, count=1000, dim=16, dtype=torch.bfloat16):
    """Rows whose channels differ by a factor of 1,000 in scale, and have means."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(1, -2, dim)
    return ((torch.randn(heads, count, dim, generator=generator) + 0.5) * scales).to(dtype)


def both(x, **options):
    """The moments of the definition, and of runs."""
    exact, fast = (Moment.zeros(x.shape[0], x.shape[-1]) for _ in range(2))
    exact.add(x)
    add_runs(fast, x, **options)
    return exact, fast


def largest_error(exact, fast):
    """Of the entries of a second moment, relative to the rows' own energy in both channels."""
    scale = exact.second_moment.diagonal(dim1=-2, dim2=-1).sqrt()
    error = (fast.second_moment - exact.second_moment).abs()
    return (error / (scale[:, :, None] * scale[:, None, :])).max().item()


@pytest.mark.parametrize("dtype", TYPES)
def test_moments_are_those_of_the_definition(dtype):
    exact, fast = both(uneven_rows(0, dtype=dtype))
    assert largest_error(exact, fast) < 1e-6  # measured 3e-7
    assert torch.allclose(fast.mean, exact.mean, rtol=1e-5, atol=1e-6)
    assert torch.allclose(fast.weight, exact.weight, rtol=1e-7, atol=0)
    eigenvalues = (torch.linalg.eigvalsh(moment.second_moment) for moment in (exact, fast))
    wanted, measured = eigenvalues
    assert (measured / wanted - 1).abs().max() < 1e-5  # measured 3e-7


@pytest.mark.parametrize("dim", [16, 20])  # 20 entries of two bytes are no whole pieces of 16 bytes
@pytest.mark.parametrize("first", [0, 3])
def test_rows_of_heads_are_those_of_their_queries(dim, first):
    for tokens_first in (False, True):  # in memory
        tensor = torch.randn(2, 6, 7, dim).bfloat16()
        if tokens_first:
            tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        tensor = tensor[:, :, first:]
        expected = [tensor[:, pair : pair + 2].reshape(-1, dim) for pair in (0, 2, 4)]
        assert torch.equal(rows_of_heads(tensor, 3), torch.stack(expected))


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 1024, 1025])
def test_runs_of_any_number_of_rows(count, monkeypatch):
    monkeypatch.setattr(moments, "_BLOCK", 1)  # one head at a time
    exact, fast = both(uneven_rows(0, heads=3, count=count))
    assert (fast.weight == count).all()
    assert torch.allclose(fast.second, exact.second, rtol=1e-6, atol=1e-3)
    assert torch.allclose(fast.first, exact.first, rtol=1e-6, atol=1e-3)


def test_sums_of_runs_are_added_in_float64():
    """Float32 cannot hold 2^34 + 1, the sum of a group of large rows and a small row."""
    x = torch.full((1, 1024, 2), 4096.0)
    x = torch.cat([x, torch.eye(1, 2).view(1, 1, 2)], 1).bfloat16()
    _, fast = both(x)
    assert (fast.second[0] == torch.tensor([[2**34 + 1, 2**34], [2**34, 2**34]])).all()
    assert (both(x, run=2048)[1].second == 2.0**34).all()


def test_memory_is_what_is_planned(monkeypatch):
    """Without the float32 copies that a CPU needs in place of tensor cores."""
    monkeypatch.setattr(moments, "_multiply", lambda left, right: torch.ones(len(left), 64, 64))
    x = uneven_rows(0, heads=4, count=8191, dim=64)
    of_text = x.transpose(0, 1).contiguous()  # [N, H, D], as a model has them
    moment = Moment.zeros(4, 64)
    rows_first = of_text.transpose(0, 1)
    most, _, _ = allocated(lambda: add_runs(moment, rows_first.contiguous()))
    planned = run_bytes(4, 8191, 64)
    assert 0.9 < planned / most < 1.3  # measured 1.04 to 1.16
