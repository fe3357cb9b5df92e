"""The CUDA encoders: compiled for three GPU generations where nvcc is there, and equal to their
definitions, on a CPU, which runs the same source, and where a GPU is."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cases import quick_first
from support.codec import assert_stored, gpu, on_cpu, on_gpu, spilled_registers
from support.encoders import FORMATS, SHAPES, factors, sample

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.kernel import draw_rows, validate_kernel
from rotationzoo.codec import cuda, cuda_encoder, cuda_rows, feedback, int2, kernels
from rotationzoo.codec.formats import FINE
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Layer
from rotationzoo.recipe.loading import PRESETS

# Every type, format, and way to split a row among lanes at least once, clipped, with and without a
# rotation.
COMPILED = [
    (128, 128, torch.bfloat16, "sglang", False), (128, 128, torch.bfloat16, "sglang", True),
    (64, 32, torch.float16, "vllm", False), (80, 80, torch.float32, "vllm", True),
    (96, 96, torch.bfloat16, "vllm", False), (192, 64, torch.float16, "sglang", True),
    (256, 128, torch.bfloat16, "vllm", True), (512, 32, torch.float32, "sglang", False),
    (128, 128, torch.float32, "fine", False), (128, 64, torch.bfloat16, "fine", True),
    (128, 128, torch.bfloat16, "4 bits", False), (128, 32, torch.float16, "8 bits", False),
]  # fmt: skip


VARIANTS = [
    cuda.Variant(dim, group, dtype, FORMATS[format], clips=True, rotates=rotates)
    for dim, group, dtype, format, rotates in COMPILED
]
VARIANTS.append(cuda.Variant(64, 4, torch.float16, FORMATS["sglang"], feedback=True))


@pytest.mark.thorough
@pytest.mark.skipif(
    not shutil.which("nvcc"), reason="needs nvcc to compile for sm_80, sm_90 and sm_100"
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_register_is_spilled(variant, tmp_path):
    spills = spilled_registers(variant, tmp_path)
    kernels = 4 if variant.feedback else 2
    assert len(spills) == kernels * 3, "each kernel for three targets"
    assert all(", 0 bytes spill stores, 0 bytes spill loads" in line for line in spills), spills


THREE = replace(int2.SGLANG, bits=3)
SHAPE, THIRDS = "the CUDA kernel has no rows of", "third bits of a multiple of 16 channels"


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "format", "problem"),
    [
        (72, 72, torch.float32, int2.SGLANG, SHAPE),
        (1024, 128, torch.float32, int2.SGLANG, SHAPE),
        (64, 64, torch.float64, int2.SGLANG, SHAPE),
        (64, 64, torch.float32, THREE, THIRDS),
        (64, 64, torch.float32, replace(FINE, fine_channels=8), THIRDS),
        (64, 64, torch.float32, replace(FINE, bits=4), THIRDS),
    ],
)
def test_shapes_that_the_kernels_do_not_take_are_refused(dim, group, dtype, format, problem):
    variant, rows = cuda.Variant(dim, group, dtype, format), torch.ones(1, 3, dim, dtype=dtype)
    assert not cuda_encoder.supports(variant)
    for encode in (
        lambda: cuda_rows.quantize(rows, 0.9, group, format),
        lambda: cuda_rows.quantize_with_feedback(rows, torch.eye(dim)[None], group, format),
    ):
        with pytest.raises(RotationZooError, match=problem):
            encode()


def test_what_the_kernels_do_not_quantize():
    assert cuda_encoder.supports(cuda.Variant(128, 128, torch.float32))
    assert not cuda_encoder.kernels_run_on(torch.device("cpu"))
    with pytest.raises(RotationZooError, match=r"is \[1, 64, 64\] and not \[2, 64, 64\]"):
        cuda_rows.quantize_with_feedback(torch.ones(2, 3, 64), torch.eye(64)[None])
    with pytest.raises(RotationZooError, match="is not finite"):
        cuda_rows.quantize_with_feedback(torch.ones(1, 3, 64), torch.full((1, 64, 64), torch.inf))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without cuda.core")
def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    variant = cuda.Variant(64, 64, torch.bfloat16, clips=True)
    with pytest.raises(RotationZooError, match=r"need NVIDIA's cuda\.core") as failure:
        cuda.compiled("quantize", variant, torch.device("cuda", 0))
    assert "cuda-core" in failure.value.hint


RATIOS = torch.tensor([0.96, 0.5, 1.0, 0.92, 0.03])


@on_gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("dim", "group"), [(64, 32), (80, 80), (112, 112), (128, 128), (192, 64), (512, 128)]
)
@pytest.mark.parametrize("dtype", cuda.TYPES, ids=str)
def test_codes_and_values_are_those_of_the_definition(device, dim, group, dtype, format):
    rows, format = sample(dim, dtype), FORMATS[format]
    for clip, ratio in ((1.0, 1.0), (RATIOS, RATIOS[:, None])):
        packed = cuda_rows.quantize(rows.to(device), clip, group, format)
        expected = int2.quantize(rows, ratio, group, format)
        assert_stored(packed, expected, format)
        definition = int2.dequantize(expected, format)
        for dtype_back in cuda.TYPES:
            values = cuda_rows.dequantize(packed, dtype_back).cpu()
            wanted = definition.to(dtype_back)
            assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))


# ---- a thread a row, or a block a row where there are few

EACH_KERNEL = pytest.mark.parametrize("few", [0, 10**9], ids=["a thread a row", "a block a row"])


@on_gpu
@EACH_KERNEL
@pytest.mark.parametrize(("dim", "group", "dtype", "format"), SHAPES)
def test_codes_with_feedback_are_those_of_the_definition(
    device, dim, group, dtype, format, few, monkeypatch
):
    monkeypatch.setattr(cuda_encoder, "_FEW", few)
    rows, factor = sample(dim, dtype), factors(dim)
    packed = cuda_rows.quantize_with_feedback(rows.to(device), factor, group, format)
    expected = feedback.quantize(rows, factor, group, format)
    assert_stored(packed, expected, format)
    assert torch.equal(cuda_rows.dequantize(packed).cpu(), int2.dequantize(expected, format))
    moved = feedback.quantize(rows.to(device), factor.to(device), group, format)
    assert_stored(packed, moved, format)


@on_gpu
@EACH_KERNEL
@pytest.mark.parametrize("number", [math.nan, math.inf, -2e18])
def test_rows_outside_the_domain_are_refused(device, number, few, monkeypatch):
    monkeypatch.setattr(cuda_encoder, "_FEW", few)
    rows = torch.ones(1, 300, 128, device=device)
    rows[0, 217, 100] = number
    for encode in (
        lambda: cuda_rows.quantize(rows.bfloat16(), 1.0),
        lambda: cuda_rows.quantize(rows.bfloat16(), 0.9),
        lambda: cuda_rows.quantize_with_feedback(rows, factors(128)[:1]),
    ):
        with pytest.raises(RotationZooError, match="not finite or exceeds"):
            encode()


@on_gpu
@pytest.mark.parametrize("dim", [80, 128, 256])
def test_rotating_in_the_kernel(device, dim):
    rows = draw_rows(None, 2, 203, dim, seed=dim).bfloat16()
    rotation = torch.linalg.qr(
        torch.randn(2, dim, dim, generator=torch.Generator().manual_seed(1))
    )[0]
    rotated = torch.empty(rows.shape, device=device)
    packed = cuda_rows.quantize(
        rows.to(device), 0.96, None, int2.SGLANG, rotation.to(device), rotated
    )
    exact = rows.double() @ rotation.double()
    bound = dim * 2.0**-24 * (rows.double().abs() @ rotation.double().abs())
    assert ((rotated.cpu() - exact).abs() <= bound).all()  # measured .09 of it
    expected = int2.quantize(rotated.cpu(), 0.96)
    assert torch.equal(packed.codes.cpu(), int2.pack(expected.codes, int2.SGLANG))
    back = cuda_rows.dequantize(packed, torch.float32, rotation.to(device)).cpu()
    values = int2.dequantize(expected).double()
    bound = dim * 2.0**-24 * (values.abs() @ rotation.double().abs().mT)
    assert ((back - values @ rotation.double().mT).abs() <= bound).all()


@on_gpu
@pytest.mark.parametrize("format", FORMATS)
def test_the_definition_is_the_same_on_a_gpu(device, format):
    rows, format = sample(128, torch.float32), FORMATS[format]
    on_cpu = int2.quantize(rows, 0.92, 32, format)
    on_device = int2.quantize(rows.to(device), 0.92, 32, format)
    for part in ("codes", "scale", "offset"):
        assert torch.equal(getattr(on_cpu, part), getattr(on_device, part).cpu())
    values = int2.dequantize(on_device, format).cpu()
    assert torch.equal(int2.dequantize(on_cpu, format), values)


EVERY = """
extern "C" __global__ void every(int bits, unsigned long long* wrong) {
  float s = __uint_as_float(0x3f800000u + blockIdx.x * blockDim.x + threadIdx.x);
  Divisor<true> narrow(s);
  for (int m = 0; m < 1 << bits; m++) {
    float x = 1.0f + m / (float)(1 << bits);
    if (narrow.divide(x) != __fdiv_rn(x, s)) atomicAdd(wrong, 1ull);
  }
}
"""


@on_gpu
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_every_quotient_of_a_16_bit_number_is_correctly_rounded(device, dtype, bits):
    """All mantissas of the number by all mantissas of the divisor; exponents do not change the
    rounding."""
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

    wrong = torch.zeros((), dtype=torch.int64, device=device)
    gpu_device = Device(torch.cuda.current_device())
    gpu_device.set_current()
    macros = cuda.Variant(128, 128, dtype).macros()
    options = ProgramOptions(arch=f"sm_{gpu_device.arch}", std="c++17", define_macro=macros)
    program = Program(kernels.read("int2.cu") + EVERY, "c++", options)
    kernel = program.compile("cubin").get_kernel("every")
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    grid = LaunchConfig(grid=(1 << 23) // 256, block=256)
    launch(stream, grid, kernel, np.int32(bits), wrong.data_ptr())
    assert wrong.item() == 0


# ---- validation of an artifact


@on_gpu
def test_validation_of_an_artifact(device, made, tmp_path):
    artifact = Artifact.open(shutil.copytree(made, tmp_path / "artifact"))
    report = validate_kernel(artifact, rows=64)
    assert report["on_gpu"]
    assert report["codes_equal"]
    layers, heads = 4, 2
    assert report["feedback_rows"] == layers * heads * 2 * 64, "keys and values"
    card = (artifact.folder / "README.md").read_text()
    assert "`int2.cu` gave codes and values bit-equal to the definition" in card
    for source in ("int2.cu", "feedback.cu"):
        assert (artifact.folder / source).read_text() == kernels.source_of(source)
    assert Artifact.open(artifact.folder).damaged_files() == []


WRONG = {
    "int2.cu": {"by.divide(x), offset), 0.5f)": "by.divide(x), offset), 0.49f)"},
    "feedback.cu": {
        "total[r] < total[0]": "total[r] <= 0.9f * total[0]",
        "totals[r] < least": "totals[r] <= 0.9f * least",
    },
}


@on_gpu
@pytest.mark.parametrize("source", WRONG)
def test_a_kernel_that_differs_is_found(source, device, made, tmp_path, monkeypatch):
    read = kernels.source_of

    def read_wrong(name: str) -> str:
        text = read(name)
        for right, wrong in WRONG[source].items():
            text = text.replace(right, wrong)
        return text

    monkeypatch.setattr(kernels, "source_of", read_wrong)
    assert read_wrong(source) != read(source)
    _forget_kernels()
    artifact = Artifact.open(shutil.copytree(made, tmp_path / "artifact"))
    place = r"layers\.\d\.key, head \d, row \d+"
    try:
        with pytest.raises(RotationZooError, match=f"{place}: the kernel's code is \\d and the"):
            validate_kernel(artifact, rows=256)
    finally:
        _forget_kernels()


def _forget_kernels() -> None:
    """Let kernels be compiled anew."""
    cuda.compiled.cache_clear()
    cuda.build.cache_clear()


# ---- the source on a CPU, and encoders of a cache


RUN_ON_CPU = quick_first(SHAPES)  # each is compiled anew


@on_cpu
@pytest.mark.usefixtures("source_on_cpu")
@pytest.mark.parametrize(("dim", "group", "_", "format"), RUN_ON_CPU)
def test_nearest_codes_and_values_are_those_of_the_definition(dim, group, _, format):
    """In float32: of 16-bit types, the source has instructions of a GPU."""
    rows, ratios = sample(dim, torch.float32)[:3, ::4], RATIOS[[0, 1, 4]]
    for clip, ratio in ((1.0, 1.0), (ratios, ratios[:, None])):
        packed = cuda_rows.quantize(rows, clip, group, format)
        expected = int2.quantize(rows, ratio, group, format)
        assert_stored(packed, expected, format)
    assert torch.equal(cuda_rows.dequantize(packed), int2.dequantize(expected, format))


@on_cpu
@pytest.mark.usefixtures("source_on_cpu")
@pytest.mark.parametrize("few", [0, 10**9], ids=["a thread a row", "a block a row"])
@pytest.mark.parametrize(("dim", "group", "dtype", "format"), RUN_ON_CPU)
def test_codes_with_feedback_of_the_source_are_those_of_the_definition(
    dim, group, dtype, format, few, monkeypatch
):
    monkeypatch.setattr(cuda_encoder, "_FEW", few)
    rows, factor = sample(dim, dtype)[:, :: 8 if few else 4], factors(dim)
    packed = cuda_rows.quantize_with_feedback(rows, factor, group, format)
    assert_stored(packed, feedback.quantize(rows, factor, group, format), format)
    rows[0, 1, -1] = torch.nan
    variant = cuda.Variant(dim, group, dtype, format)
    stored = cuda_encoder.feedback_encoder(factor, variant, rows.device).store(rows)
    assert stored.metadata[..., 0].isnan().all(-1).nonzero().tolist() == [[0, 1]]
    assert stored.metadata[..., 0].isnan().any(-1).sum() == 1, "all others are numbers"
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
    assert encode(rows).scale.isnan().nonzero().tolist() == [[0, 1, 7, 0]]
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        encode.check()
    encode.check()  # only once


HEADS, DIM = 3, 32


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=gpu)]
)
@pytest.mark.parametrize("format", quick_first(int2.FORMATS))
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


# ---- the table of programs


@pytest.mark.parametrize("source", kernels.PROGRAMS)
def test_kernels_take_what_their_table_says(source):
    kernels.check(source)


def test_a_kernel_that_takes_something_else_is_named_with_what_the_table_has(monkeypatch):
    text = kernels.source_of("plan.cu").replace("const int* lengths", "const Count* lengths")
    monkeypatch.setattr(kernels, "source_of", lambda name: text)
    problem = r"plan in plan.cu takes Count\* lengths, where Plan has int\* lengths"
    with pytest.raises(TypeError, match=problem):
        kernels.check("plan.cu")
