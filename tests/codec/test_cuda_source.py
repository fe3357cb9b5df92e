"""The CUDA encoders, whose sources are run on a CPU, and encoders of a cache: equal to their
definitions."""

from dataclasses import replace

import pytest
import torch
from support.codec import assert_stored, gpu, on_cpu
from support.encoders import SHAPES, factors, sample

from rotationzoo.artifact.fit import fit
from rotationzoo.codec import cuda, cuda_encoder, cuda_rows, feedback, int2
from rotationzoo.codec.formats import FINE
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Layer
from rotationzoo.recipe.loading import PRESETS

# Each is compiled anew; an offset, third bits and four bits tell most.
EVERY = [
    pytest.param(*shape, marks=[pytest.mark.thorough] * (number > 2))
    for number, shape in enumerate(SHAPES)
]
RATIOS = torch.tensor([0.96, 0.5, 0.03])


@on_cpu
@pytest.mark.usefixtures("source_on_cpu")
@pytest.mark.parametrize(("dim", "group", "_", "format"), EVERY)
def test_nearest_codes_and_values_are_those_of_the_definition(dim, group, _, format):
    """In float32: of 16-bit types, the source has instructions of a GPU."""
    rows = sample(dim, torch.float32)[:3, ::4]
    for clip, ratio in ((1.0, 1.0), (RATIOS, RATIOS[:, None])):
        packed = cuda_rows.quantize(rows, clip, group, format)
        expected = int2.quantize(rows, ratio, group, format)
        assert_stored(packed, expected, format)
    assert torch.equal(cuda_rows.dequantize(packed), int2.dequantize(expected, format))


@on_cpu
@pytest.mark.usefixtures("source_on_cpu")
@pytest.mark.parametrize("few", [0, 10**9], ids=["a thread a row", "a block a row"])
@pytest.mark.parametrize(("dim", "group", "dtype", "format"), EVERY)
def test_codes_with_feedback_are_those_of_the_definition(
    dim, group, dtype, format, few, monkeypatch
):
    monkeypatch.setattr(cuda_encoder, "_FEW", few)
    rows, factor = sample(dim, dtype)[:, :: 8 if few else 4], factors(dim)
    packed = cuda_rows.quantize_with_feedback(rows, factor, group, format)
    assert_stored(packed, feedback.quantize(rows, factor, group, format), format)
    rows[0, 1, -1] = torch.nan
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        cuda_rows.quantize_with_feedback(rows, factor, group, format)


@on_cpu
@pytest.mark.usefixtures("source_on_cpu")
def test_an_encoder_of_a_cache_has_third_bits_behind_the_codes():
    heads = sample(128, torch.float32)[:2, ::4]
    rows = torch.stack([heads, heads.flip(1)])
    variant = cuda.Variant(128, 128, torch.float32, FINE)
    encode = cuda_encoder.clip_encoder(torch.tensor([0.96, 0.5]), variant, torch.device("cpu"))
    stored = encode(rows)
    expected = int2.quantize(rows, torch.tensor([[0.96], [0.5]]), None, FINE)
    assert torch.equal(int2.unpack(stored.codes, FINE), expected.codes)
    assert torch.equal(stored.scale, expected.scale)
    assert stored.offset.shape == expected.offset.shape
    rows[0, 1, 7, 3] = torch.nan
    encode(rows)
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        encode.check()
    encode.check()  # only once


HEADS, DIM = 3, 32


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
        return replace(rotation, feedback=factors(DIM)[:HEADS])

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
