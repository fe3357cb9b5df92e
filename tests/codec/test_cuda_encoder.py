"""Encoders of a cache on a GPU: with kernels that compute the definition on a CPU, and with the
real ones where a GPU is."""

from dataclasses import replace

import pytest
import torch
from support.codec import gpu

from rotationzoo.calibration.fit import fit
from rotationzoo.codec import cuda, cuda_encoder, feedback, int2
from rotationzoo.codec.clip import clip_position
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.error_feedback import factorize
from rotationzoo.model.geometry import Layer
from rotationzoo.recipe import PRESETS
from rotationzoo.simulation.arm import Arm

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
            expected = clip_position(CLIP, channels, format.interpolated)
            assert torch.equal(entry, expected[0].int())
            assert torch.equal(weight, expected[1])
            assert variant.clips
            assert matrix is rotated is None
            kind = "clip"
        else:
            assert name == cuda.FEW, "there are few rows"
            weights, codes, metadata, refused = arguments
            assert torch.equal(weights, factor())
            kind = "feedback"
        fine = rows.abs().amax() <= int2.LARGEST
        refused[...] |= ~fine
        stored = definition(rows if fine else torch.zeros_like(rows), kind, variant.group, format)
        codes[:] = int2.pack(stored.codes, format)
        metadata[:] = torch.stack([stored.scale, stored.offset], -1)

    return kernel


def encoder(kind, group, format, device):
    variant = cuda.Variant(DIM, group, torch.float32, format)
    if kind == "clip":
        return cuda_encoder.clip_encoder(CLIP, variant, torch.device(device))
    return cuda_encoder.feedback_encoder(factor(), variant, torch.device(device))


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
        assert torch.equal(stored.codes.cpu(), int2.pack(expected.codes, format))
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
    encode.check()  # only once


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", int2.FORMATS)
def test_a_simulation_encodes_with_the_kernel_of_error_feedback(format, device, monkeypatch):
    """Not by the definition, which a GPU computes in thousands of operations: bit by bit the
    same."""
    arm = Arm("", rotations(), 16, rounding="feedback")
    rows = torch.randn(2, HEADS, 5, DIM, generator=torch.Generator().manual_seed(1)).to(device)
    with monkeypatch.context() as patch:
        patch.setattr(Arm, "encoder", lambda *_: None)
        expected = arm.fake_quantize(rows, 0, "key", int2.FORMATS[format])
    if device == "cpu":
        monkeypatch.setattr(cuda, "compiled", compile_for_cpu)
        monkeypatch.setattr(cuda_encoder, "kernels_run_on", lambda device: True)
    else:
        monkeypatch.setattr(feedback, "quantize", None)
    assert torch.equal(arm.fake_quantize(rows, 0, "key", int2.FORMATS[format]), expected)
    (encode,) = arm._encoders.values()
    assert encode.variant.feedback
    rows[1, 2, 3, 4] = torch.nan
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        arm.fake_quantize(rows, 0, "key", int2.FORMATS[format])


def rotations():
    def add_factor(_, __, rotation):
        return replace(rotation, feedback=factor())

    return fit(None, PRESETS["random"], [Layer(0, 0, HEADS, HEADS, DIM, DIM)]).replace(add_factor)


def test_what_the_kernels_do_not_quantize():
    def supports(dim, group, format):
        return cuda_encoder.supports(cuda.Variant(dim, group, torch.float32, format))

    assert supports(128, 32, int2.SGLANG)
    assert not supports(72, 72, int2.SGLANG)
    assert not supports(128, 128, int2.SIMULATED["sglang-bisected"])
    assert not cuda_encoder.kernels_run_on(torch.device("cpu"))
