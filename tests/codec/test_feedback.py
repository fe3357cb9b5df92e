"""Codes chosen by error feedback: the formula, what it gains, and that the format is the same."""

from dataclasses import replace

import pytest
import torch
from rotationzoo.linalg.error_feedback import factorize, remaining_share, whitening
from support.codec import restore, restore_with_feedback

from rotationzoo.codec import feedback, int2
from rotationzoo.codec.formats import BITS, FINE
from rotationzoo.linalg.hadamard import hadamard


def concentrated_metric(heads: int, dim: int) -> torch.Tensor:
    """Metrics `[H, D, D]` whose eigenvalues fall like 1 / n, in random bases."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator).double()).Q
    return basis @ torch.diag(1 / torch.arange(1, dim + 1).double()) @ basis.mT


def rows_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def weighted_error(rows: torch.Tensor, restored: torch.Tensor, metric: torch.Tensor) -> float:
    """`E[e M e^T]` of the errors of rows `[B, H, T, D]`."""
    error = (restored - rows).double()
    return ((error @ metric) * error).sum(-1).mean().item()


def test_what_is_left_of_errors_is_a_ratio_of_means_of_eigenvalues():
    metric = torch.stack([concentrated_metric(1, 16)[0], torch.eye(16).double()])
    scaled = metric / metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    values = torch.linalg.eigvalsh(scaled + 0.01 * torch.eye(16))
    expected = values.log().mean(-1).exp() / values.mean(-1)
    assert torch.allclose(remaining_share(factorize(metric)), expected, rtol=1e-5)
    assert expected[0] < 0.75 < 0.999 < expected[1]


def test_a_metric_of_zeros_rounds_each_channel_alone():
    factor = factorize(torch.zeros(1, 16, 16))
    assert torch.equal(factor, 0.01 * torch.eye(16)[None])
    assert restore_with_feedback(rows_of(1, 1, 8, 16), factor).isfinite().all()


# Measured .54 for whole rows and .46 for groups of 16, of codes that are clipped; .32, .49, .57 and
# .58 for codes of other bits, which are not. The geometric mean of the eigenvalues is .56 of their
# arithmetic mean.
GAINS = [(format, group, 0.92, 0.6) for format in int2.FORMATS.values() for group in (None, 16)]
GAINS += [(replace(int2.SGLANG, bits=bits), None, 1.0, 0.7) for bits in BITS]


@pytest.mark.parametrize(("format", "group", "clip", "share"), GAINS)
def test_errors_that_queries_read_are_smaller_than_those_of_nearest_codes(
    format, group, clip, share
):
    metric, rows = concentrated_metric(2, 64), rows_of(1, 2, 256, 64)
    codes = feedback.quantize(rows, factorize(metric), group, format)
    restored = int2.dequantize(codes, format)
    nearest = restore(rows, clip, group, format)
    assert weighted_error(rows, restored, metric) < share * weighted_error(rows, nearest, metric)
    assert codes.codes.dtype == torch.uint8
    assert int(codes.codes.max()) < 2**format.bits
    assert codes.scale.dtype == int2.METADATA_TYPES[format.metadata]
    assert codes.scale.shape == (1, 2, 256, 64 // (group or 64))


def test_a_row_gets_the_codes_of_the_range_with_the_smallest_error():
    """Written out row by row: every range encoded by the sum in the docstring."""
    factor, rows = factorize(concentrated_metric(1, 8)), rows_of(1, 1, 6, 8)
    expected = torch.stack([codes_of_best_range(row, factor) for row in rows[0, 0]])
    close = 16 * torch.finfo(torch.float32).eps * rows.abs().max()
    assert (restore_with_feedback(rows, factor)[0, 0] - expected).abs().max() <= close
    assert (restore(rows)[0, 0] - expected).abs().max() > 1e-3


def codes_of_best_range(row, factor):
    unit = factor[0].triu(1) + torch.eye(8)
    low, high = row.min().item(), row.max().item()
    results = []
    for share in feedback.RANGES:
        middle, half = (low + high) / 2, (high - low) / 2 * share
        scale, errors = 2 * half / 3, torch.zeros(8)
        for channel in range(8):
            target = row[channel] - (errors @ unit)[channel]
            code = ((target - (middle - half)) / scale).round().clamp(0, 3)
            errors[channel] = middle - half + code * scale - row[channel]
        terms = factor[0].diagonal() * (errors @ unit) ** 2
        results.append((terms.sum().item(), row + errors))
    return min(results, key=lambda result: result[0])[1]


@pytest.mark.parametrize("rows", [torch.full((1, 1, 1, 8), float("nan")), torch.ones(1, 1, 1, 6)])
def test_rows_that_the_codec_refuses_are_refused(rows):
    with pytest.raises(int2.RotationZooError):
        feedback.quantize(rows, torch.eye(rows.shape[-1])[None])


def test_constant_rows_come_back():
    rows = torch.full((1, 1, 3, 8), 2.5)
    assert torch.allclose(restore_with_feedback(rows, torch.eye(8)[None]), rows)


# ---- whitening, and the format with third bits


def varying_rows(metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[1, H, 512, D]` whose spectrum falls like 1 / n in random directions, and the second
    moment `[H, D, D]` that they are drawn from."""
    heads, dim = metric.shape[:2]
    moment = concentrated_metric(heads, dim).flip(0)
    root = torch.linalg.cholesky(moment)
    return (rows_of(1, heads, 512, dim).double() @ root.mT).float(), moment


def test_whitening_goes_half_the_way_to_white_rows():
    moment = concentrated_metric(2, 16)
    white = whitening(moment).double()
    spectrum, after = torch.linalg.eigvalsh(moment), torch.linalg.eigvalsh(white @ moment @ white)
    assert torch.allclose(white, white.mT, atol=1e-6)
    # The damping adds .01 of the mean eigenvalue, which is 3 to 5 times the smallest's share.
    damped = spectrum + 0.01 * spectrum.mean(-1, keepdim=True)
    expected = spectrum / damped.sqrt()
    ratio = after.sort(-1).values / expected.sort(-1).values
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-5)
    assert torch.allclose(white.det().log(), torch.zeros(2).double(), atol=1e-5)
    assert whitening(torch.zeros(1, 8, 8)).isfinite().all()


@pytest.mark.parametrize("name", ["sglang", "fine"])
def test_rows_that_vary_more_in_some_directions_are_stored_better_whitened(name):
    metric, format = concentrated_metric(2, 64), int2.SIMULATED[name]
    rows, moment = varying_rows(metric)
    turn = hadamard(64).double()
    errors = []
    for white in (torch.eye(64).expand(2, -1, -1).double(), whitening(moment).double()):
        forward, inverse = white @ turn, torch.linalg.inv(white @ turn)
        factor = factorize(inverse @ metric @ inverse.mT)
        stored = restore_with_feedback(
            (rows.double() @ forward).float(), factor, None, format
        ).double()
        errors.append(weighted_error(rows, stored @ inverse, metric))
    assert errors[1] < 0.75 * errors[0]  # measured .65 and .64


def test_a_scale_and_third_bits_take_the_bytes_of_a_scale_and_an_offset():
    for dim in (64, 128, 256):
        bits = [int2.bits_per_element(dim, format=each) for each in (int2.SGLANG, FINE)]
        assert bits[0] == bits[1]
        assert FINE.row_bytes(dim) + 2 == int2.SGLANG.row_bytes(dim) + 8
    with pytest.raises(int2.RotationZooError, match="have no 48 of three bits"):
        int2.quantize(rows_of(1, 32), format=FINE)


def test_third_bits_halve_the_step_of_the_last_channels():
    fine = replace(FINE, fine_channels=8)
    row = torch.linspace(-1, 1, 16)[None]
    stored = int2.quantize(row, format=fine)
    assert stored.offset.shape == (1, 0)
    assert stored.scale.item() == 0.5
    levels = int2.dequantize(stored, fine)[0]
    assert torch.equal(levels[:8], ((row[0, :8] / 0.5).floor() + 0.5) * 0.5)
    assert torch.equal(levels[8:15], ((row[0, 8:15] / 0.25).floor() + 0.5) * 0.25)
    assert levels[15].item() == 0.875  # the largest is at the end of the range
    packed = int2.pack(stored.codes, fine)
    assert packed.shape == (1, 5)
    assert torch.equal(int2.unpack(packed, fine), stored.codes)


def test_third_bits_are_worth_more_than_an_offset():
    metric, rows = concentrated_metric(2, 128), rows_of(1, 2, 256, 128)
    factor = factorize(metric)
    errors = []
    for format in (int2.SGLANG, FINE, replace(FINE, fine_channels=0)):
        restored = restore_with_feedback(rows, factor, None, format)
        errors.append(weighted_error(rows, restored, metric))
    assert errors[1] < 0.7 * errors[0]  # measured .61
    assert errors[2] < errors[0]  # measured .90: an offset buys nothing
