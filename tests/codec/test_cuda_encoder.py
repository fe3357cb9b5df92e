"""Encoders of a cache on a GPU: with kernels that compute the definition on a CPU, and with the
real ones where a GPU is."""

import pytest
import torch
from support.devices import gpu

from rotationzoo.codec import cuda, cuda_encoder, feedback, int2
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.error_feedback import factorize

HEADS, DIM = 3, 32
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
CLIP = torch.tensor([0.9, 1.0, 0.96], dtype=torch.float64)


def factor():
    rows = torch.randn(HEADS, 100, DIM, dtype=torch.float64, generator=torch.manual_seed(1))
    return factorize(rows.mT @ rows / 100).float()


def definition(rows, kind, group, format):
    if kind == "clip":
        return int2.quantize(rows, CLIP[:, None], group, format)
    return feedback.quantize(rows, factor(), group, format)


def compile_for_cpu(name, variant, device):
    """A kernel that takes the arguments of the real one."""
    assert variant.dtype == torch.float32
    format = variant.format

    def kernel(rows, count, *arguments):
        assert rows.shape == (HEADS, count, DIM)
        assert rows.is_contiguous()
        if name == "quantize":
            matrix, entry, weight, codes, metadata, rotated, refused = arguments
            channels = variant.group if format.clip_scope == "group" else DIM
            expected = int2.clip_position(CLIP, channels, format.interpolated)
            assert torch.equal(entry, expected[0].int())
            assert torch.equal(weight, expected[1])
            assert variant.clips
            assert matrix is rotated is None
            kind = "clip"
        else:
            assert name == "quantize_with_feedback"
            weights, codes, metadata, refused = arguments
            assert torch.equal(weights, factor())
            kind = "feedback"
        fine = rows.abs().amax() <= int2.LARGEST
        refused[...] |= ~fine
        stored = definition(rows if fine else torch.zeros_like(rows), kind, variant.group, format)
        codes[:] = int2.pack(stored.codes, format.packing)
        metadata[:] = torch.stack([stored.scale, stored.offset], -1)

    return kernel


def encoder(kind, group, format, device):
    if kind == "clip":
        return cuda_encoder.clip_encoder(CLIP, DIM, group, format, torch.device(device))
    return cuda_encoder.feedback_encoder(factor(), group, format, torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["clip", "feedback"])
@pytest.mark.parametrize("format", int2.FORMATS)
@pytest.mark.parametrize("batch", [1, 2])
def test_codes_are_those_of_the_definition(batch, format, kind, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(cuda, "compiled", compile_for_cpu)
    format = int2.FORMATS[format]
    encode = encoder(kind, 16, format, device)
    for tokens in (1, 5):
        rows = torch.randn(batch, HEADS, tokens, DIM, generator=torch.manual_seed(tokens))
        stored, expected = encode(rows.to(device)), definition(rows, kind, 16, format)
        assert torch.equal(stored.codes.cpu(), int2.pack(expected.codes, format.packing))
        assert torch.equal(stored.scale.cpu(), expected.scale)
        assert torch.equal(stored.offset.cpu(), expected.offset)
    encode.check()


@pytest.mark.parametrize("device", DEVICES)
def test_a_refused_row_is_reported_when_somebody_asks(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(cuda, "compiled", compile_for_cpu)
    encode = encoder("clip", DIM, int2.SGLANG, device)
    rows = torch.ones(1, HEADS, 2, DIM, device=device)
    encode(rows.index_fill(3, torch.tensor([3], device=device), torch.nan))
    encode(rows)
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        encode.check()


def test_what_the_kernels_do_not_quantize():
    assert cuda_encoder.supports(128, 32, int2.SGLANG)
    assert not cuda_encoder.supports(72, 72, int2.SGLANG)
    assert not cuda_encoder.supports(128, 128, int2.SIMULATED["sglang-bisected"])
    assert not cuda_encoder.kernels_run_on(torch.device("cpu"))
