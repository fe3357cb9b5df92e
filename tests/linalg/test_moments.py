"""Second moments, and means of texts that are paired."""

import pytest
import torch

from rotationzoo.linalg.moments import Moment, from_raw, to_raw
from rotationzoo.linalg.paired import paired_difference, weighted_mean


def rows(seed, heads=2, count=50, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, count, dim, generator=generator, dtype=dtype)


def moment_of(x, weights=None):
    moment = Moment.zeros(x.shape[0], x.shape[-1])
    moment.add(x, weights)
    return moment


def test_second_moment_and_mean():
    x = rows(0)
    moment = moment_of(x)
    expected = torch.einsum("hnd,hne->hde", x, x) / 50
    assert torch.allclose(moment.second_moment, expected, rtol=1e-14, atol=1e-15)
    assert torch.allclose(moment.mean, x.mean(1), rtol=1e-14, atol=1e-15)
    assert torch.equal(moment.second_moment, moment.second_moment.mT)


def test_shards_merge_by_addition():
    x, y = rows(0), rows(1, count=30)
    merged, whole = moment_of(x) + moment_of(y), moment_of(torch.cat([x, y], 1))
    assert torch.allclose(merged.second_moment, whole.second_moment, rtol=1e-14, atol=1e-15)
    assert torch.allclose(merged.mean, whole.mean, rtol=1e-14, atol=1e-15)


def test_weights_count_like_repetitions():
    x = rows(0)
    doubled = moment_of(x, torch.full(x.shape[:2], 2.0, dtype=torch.float64)).second_moment
    repeated = moment_of(torch.cat([x, x], 1)).second_moment
    assert torch.allclose(doubled, repeated, rtol=1e-14, atol=1e-15)


def test_products_are_formed_in_float64():
    """A direction ten thousand times weaker than the rest survives, which a float32 product would
    lose."""
    basis, _ = torch.linalg.qr(rows(2, heads=1, count=8))
    scales = torch.tensor([1e3] * 7 + [1e-1], dtype=torch.float64)
    x = rows(3, heads=1, count=4096) * scales @ basis.mT
    x32 = x.float()
    expected = torch.linalg.eigvalsh(x32.double().mT @ x32.double() / 4096)[0, 0]
    smallest = torch.linalg.eigvalsh(moment_of(x32).second_moment)[0, 0]
    assert abs(smallest / expected - 1) < 1e-6
    in_float32 = torch.linalg.eigvalsh((x32.mT @ x32 / 4096).double())[0, 0]
    assert abs(in_float32 / expected - 1) > 1e-2


def test_checkpoint_form_loses_no_bit():
    statistics = {
        3: {"key": moment_of(rows(0)), "value": moment_of(rows(1))},
        7: {"key": moment_of(rows(2))},
    }
    back = from_raw(to_raw(statistics))
    assert back.keys() == statistics.keys()
    for layer, kinds in statistics.items():
        for kind, moment in kinds.items():
            for field in ("second", "first", "weight"):
                assert torch.equal(getattr(back[layer][kind], field), getattr(moment, field))


def test_texts_weigh_as_much_as_they_have_tokens():
    mean, error = paired_difference([2.0, 3.0, 9.0], [1.0, 1.0, 1.0], [300, 100, 0])
    assert mean == pytest.approx(1.25)
    assert error == pytest.approx(((0.75 * 0.25) ** 2 + (0.25 * 0.75) ** 2) ** 0.5 * 2**0.5)


def test_a_single_text_has_no_standard_error():
    assert weighted_mean(torch.tensor([2.0]), torch.tensor([7.0])) == (2.0, None)
