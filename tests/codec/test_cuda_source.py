"""The CUDA encoders whose threads exchange numbers, run on a CPU, and encoders of a cache on a GPU:
equal to their definitions. tests/codec/test_cuda_feedback.py has the kernel with a thread a row."""

from dataclasses import replace

import pytest
import torch
from support.codec import assert_stored, gpu, on_cpu, on_gpu

from rotationzoo.artifact.fit import fit
from rotationzoo.checks.comparison import draw_rows, edge_rows
from rotationzoo.codec import cuda, cuda_encoder, cuda_rows, feedback, int2
from rotationzoo.codec.formats import FINE
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Layer
from rotationzoo.linalg.error_feedback import factorize
from rotationzoo.recipe.loading import PRESETS

SYMMETRIC = replace(FINE, fine_channels=0)
# Every way to lay out a row, with and without third bits: a whole row of them, some that end
# within a word of 32, and groups that hold coarse and fine channels.
CASES = [
    (128, 128, FINE), (128, 64, replace(FINE, fine_channels=80)),
    (80, 80, replace(FINE, fine_channels=16)), (96, 96, replace(FINE, fine_channels=96)),
    (64, 32, replace(FINE, packing="consecutive")), (64, 64, SYMMETRIC),
    (64, 64, int2.SGLANG), (64, 32, int2.FORMATS["mlx"]),
    (64, 64, replace(SYMMETRIC, bits=4)), (80, 80, replace(SYMMETRIC, bits=8)),
    (128, 32, replace(int2.FORMATS["vllm"], bits=4)), (96, 96, replace(int2.SGLANG, bits=4)),
    (64, 32, replace(int2.FORMATS["vllm"], bits=8)),
]  # fmt: skip
# Each case is compiled anew; third bits, an offset and four bits tell most.
FEW = [
    pytest.param(*case, marks=[pytest.mark.thorough] * (case not in (CASES[0], CASES[6], CASES[8])))
    for case in CASES
]


def sample(dim: int) -> torch.Tensor:
    """Two heads of 30 rows with tails and of edge rows."""
    edges = edge_rows(dim, int2.LARGEST * 0.99).expand(2, -1, -1)
    return torch.cat([edges, draw_rows(None, 2, 30, dim, seed=dim)], dim=1)


@on_cpu
@pytest.mark.usefixtures("source_on_cpu")
@pytest.mark.parametrize(("dim", "group", "format"), FEW)
def test_nearest_codes_and_values_are_those_of_the_definition(dim, group, format):
    rows = sample(dim)
    for clip in (1.0, torch.tensor([0.96, 0.5])):
        packed = cuda_rows.quantize(rows, clip, group, format)
        ratio = clip[:, None] if isinstance(clip, torch.Tensor) else clip
        expected = int2.quantize(rows, ratio, group, format)
        assert_stored(packed, expected, format)
    assert torch.equal(cuda_rows.dequantize(packed), int2.dequantize(expected, format))


@on_cpu
@pytest.mark.usefixtures("source_on_cpu")
@pytest.mark.parametrize(("dim", "group", "format"), FEW)
def test_few_rows_with_feedback_are_those_of_the_definition(dim, group, format):
    rows = sample(dim)
    normal = torch.randn(2, 2 * dim, dim, generator=torch.Generator().manual_seed(dim)).double()
    factor = factorize(normal.mT @ normal / dim)
    packed = cuda_rows.quantize_with_feedback(rows, factor, group, format)
    assert_stored(packed, feedback.quantize(rows, factor, group, format), format)


@on_cpu
@pytest.mark.usefixtures("source_on_cpu")
def test_an_encoder_of_a_cache_has_third_bits_behind_the_codes():
    rows = torch.stack([sample(64), sample(64).flip(1)])
    variant = cuda.Variant(64, 64, torch.float32, FINE)
    encode = cuda_encoder.clip_encoder(torch.tensor([0.96, 1.0]), variant, torch.device("cpu"))
    stored = encode(rows)
    expected = int2.quantize(rows, torch.tensor([[0.96], [1.0]]), None, FINE)
    assert torch.equal(int2.unpack(stored.codes, FINE), expected.codes)
    assert torch.equal(stored.scale, expected.scale)
    assert stored.offset.shape == expected.offset.shape
    rows[0, 1, 7, 3] = torch.nan
    encode(rows)
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        encode.check()
    encode.check()  # only once


HEADS, DIM = 3, 32
CLIP = torch.tensor([0.9, 1.0, 0.96], dtype=torch.float64)


def factor_of_heads():
    rows = torch.randn(HEADS, 100, DIM, dtype=torch.float64, generator=torch.manual_seed(1))
    return factorize(rows.mT @ rows / 100).float()


def definition(rows, kind, group, format):
    if kind == "clip":
        return int2.quantize(rows, CLIP[:, None], group, format)
    return feedback.quantize(rows, factor_of_heads(), group, format)


def encoder(kind, group, format, device):
    variant = cuda.Variant(DIM, group, torch.float32, format)
    if kind == "clip":
        return cuda_encoder.clip_encoder(CLIP, variant, torch.device(device))
    return cuda_encoder.feedback_encoder(factor_of_heads(), variant, torch.device(device))


@on_gpu
@pytest.mark.parametrize("kind", ["clip", "feedback"])
@pytest.mark.parametrize("format", int2.FORMATS)
@pytest.mark.parametrize("batch", [1, 2])
def test_codes_are_those_of_the_definition(batch, format, kind, device):
    format = int2.FORMATS[format]
    encode = encoder(kind, 16, format, device)
    for tokens in (1, 5):
        rows = torch.randn(batch, HEADS, tokens, DIM, generator=torch.manual_seed(tokens))
        stored, expected = encode(rows.to(device)), definition(rows, kind, 16, format)
        assert torch.equal(stored.codes.cpu(), int2.pack(expected.codes, format))
        assert torch.equal(stored.scale.cpu(), expected.scale)
        assert torch.equal(stored.offset.cpu(), expected.offset)
    encode.check()


@on_gpu
def test_a_refused_row_is_reported_when_somebody_asks(device):
    encode = encoder("clip", DIM, int2.SGLANG, device)
    rows = torch.ones(1, HEADS, 2, DIM, device=device)
    encode(rows.index_fill(3, torch.tensor([3], device=device), torch.nan))
    encode(rows)
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        encode.check()
    encode.check()  # only once


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=gpu)]
)
@pytest.mark.parametrize("format", int2.FORMATS)
def test_a_simulation_encodes_with_the_kernel_of_error_feedback(
    format, device, monkeypatch, request
):
    """Not by the definition, which a GPU computes in thousands of operations: bit by bit the
    same."""

    def add_factor(_, __, rotation):
        return replace(rotation, feedback=factor_of_heads())

    rotations = fit(None, PRESETS["random"], [Layer(0, 0, HEADS, HEADS, DIM, DIM)])
    arm = RotatedCodec(rotations.replace(add_factor), 16, rounding="feedback")
    rows = torch.randn(2, HEADS, 5, DIM, generator=torch.Generator().manual_seed(1)).to(device)
    with monkeypatch.context() as patch:
        patch.setattr(RotatedCodec, "encoder", lambda *_: None)
        expected = arm.fake_quantize(rows, 0, "key", int2.FORMATS[format])
    if device == "cpu":
        request.getfixturevalue("source_on_cpu")
        monkeypatch.setattr(cuda_encoder, "kernels_run_on", lambda device: True)
    else:
        monkeypatch.setattr(feedback, "quantize", None)
    assert torch.equal(arm.fake_quantize(rows, 0, "key", int2.FORMATS[format]), expected)
    (encode,) = arm._encoders.values()
    assert encode.variant.feedback
    rows[1, 2, 3, 4] = torch.nan
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        arm.fake_quantize(rows, 0, "key", int2.FORMATS[format])


def test_what_the_kernels_do_not_quantize():
    def supports(dim, group, format):
        return cuda_encoder.supports(cuda.Variant(dim, group, torch.float32, format))

    assert supports(128, 32, int2.SGLANG)
    assert not supports(72, 72, int2.SGLANG)
    assert not supports(128, 128, int2.SIMULATED["sglang-bisected"])
    assert not cuda_encoder.kernels_run_on(torch.device("cpu"))
