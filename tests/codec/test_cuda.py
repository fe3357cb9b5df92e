"""The CUDA encoder: compiled for three GPU generations, and equal to its definition."""

import math
import shutil

import numpy as np
import pytest
import torch
from support.cases import quick_first
from support.codec import GENERATIONS, assert_stored, compile_kernels, on_cpu, on_gpu

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.kernel import draw_rows, rows_of_each_type, validate_kernel
from rotationzoo.codec import cuda, cuda_encoder, cuda_rows, int2, kernels
from rotationzoo.codec.int2 import FORMATS
from rotationzoo.errors import RotationZooError

# Every type, format, and way to split a row among lanes, clipped, with and without a rotation.
COMPILED = [
    (128, 128, torch.bfloat16, "sglang", False), (128, 128, torch.bfloat16, "sglang", True),
    (64, 32, torch.float16, "vllm", False), (80, 80, torch.float32, "vllm", True),
    (96, 96, torch.bfloat16, "vllm", False), (192, 64, torch.float16, "sglang", True),
    (256, 128, torch.bfloat16, "vllm", True), (512, 32, torch.float32, "sglang", False),
]  # fmt: skip
VARIANTS = [
    cuda.Variant(dim, group, dtype, FORMATS[format], clips=True, rotates=rotates)
    for dim, group, dtype, format, rotates in COMPILED
]


@pytest.mark.thorough
@pytest.mark.skipif(
    not shutil.which("nvcc"), reason="needs nvcc to compile for sm_80, sm_90 and sm_100"
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_register_is_spilled(variant, tmp_path):
    text = kernels.read("int2.cu")
    assert "__CUDA_ARCH__" not in text
    output = compile_kernels(text, variant.macros(), tmp_path, [GENERATIONS])
    spills = [line for line in output.splitlines() if "spill stores" in line]
    assert len(spills) == 2 * 3, "each kernel for three targets"
    assert all(", 0 bytes spill stores, 0 bytes spill loads" in line for line in spills), spills


# Every type and format. Groups are the row, hold blocks of 16 channels, and split them.
SHAPES = [
    (80, 20, torch.float32, FORMATS["vllm"]), (128, 128, torch.bfloat16, FORMATS["sglang"]),
    (64, 4, torch.float16, FORMATS["sglang"]), (96, 32, torch.bfloat16, FORMATS["vllm"]),
    (320, 64, torch.float32, FORMATS["vllm"]),
]  # fmt: skip


def sample(dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows `[5, N, D]`: heavy tails, ties, all exponents, subnormals, a large offset."""
    generator = torch.Generator().manual_seed(dim)
    shape = 5, 16, dim
    normal = torch.randn(shape, generator=generator)
    ties = torch.randint(-6, 7, shape, generator=generator) / 2
    exponents = torch.randint(-120, 60, shape, generator=generator).float()
    subnormal = torch.randint(-50, 51, shape, generator=generator) * 2.0**-149
    heavy = draw_rows(None, 5, 16, dim, seed=dim)
    rows = torch.cat([heavy, ties, normal * exponents.exp2(), subnormal, 300 + normal], dim=1)
    return {typed.dtype: typed for typed in rows_of_each_type(rows)}[dtype]


SHAPE = "the CUDA kernel takes no rows of"


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "format", "problem"),
    [
        (72, 72, torch.float32, "sglang", SHAPE),
        (1024, 128, torch.float32, "sglang", SHAPE),
        (64, 64, torch.float64, "sglang", SHAPE),
        (64, 64, torch.float32, "segments", "no nearest ones"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(dim, group, dtype, format, problem):
    format, rows = int2.SIMULATED[format], torch.ones(1, 3, dim, dtype=dtype)
    assert not cuda_encoder.supports(cuda.Variant(dim, group, dtype, format))
    with pytest.raises(RotationZooError, match=problem):
        cuda_rows.quantize(rows, 0.9, group, format)


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


@on_gpu
@pytest.mark.parametrize("number", [math.nan, math.inf, -2e18])
def test_rows_outside_the_domain_are_refused(device, number):
    rows = torch.ones(1, 300, 128, device=device)
    rows[0, 217, 100] = number
    for ratio in (1.0, 0.9):
        with pytest.raises(RotationZooError, match="not finite or exceeds"):
            cuda_rows.quantize(rows.bfloat16(), ratio)


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
    assert ((rotated.cpu() - exact).abs() <= bound).all()  # measured 0.09 of it
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
    """All mantissas by all mantissas of divisors. Exponents do not change the rounding."""
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
    assert report["device"] == torch.cuda.get_device_name()
    card = (artifact.folder / "README.md").read_text()
    assert "`int2.cu` gave codes and values bit-equal to the definition" in card
    assert (artifact.folder / "int2.cu").read_text() == kernels.source_of("int2.cu")
    assert Artifact.open(artifact.folder).damaged_files() == []


WRONG = "by.divide(x), offset), 0.5f)", "by.divide(x), offset), 0.49f)"


@on_gpu
def test_a_kernel_that_differs_is_found(device, made, tmp_path, monkeypatch):
    text = kernels.source_of("int2.cu")
    assert WRONG[0] in text
    monkeypatch.setattr(kernels, "source_of", lambda name: text.replace(*WRONG))
    for name in ("compiled", "build"):  # anew
        monkeypatch.setattr(cuda, name, getattr(cuda, name).__wrapped__)
    artifact = Artifact.open(shutil.copytree(made, tmp_path / "artifact"))
    place = r"layers\.\d\.key, head \d, row \d+"
    with pytest.raises(RotationZooError, match=f"{place}: the kernel's code is \\d and the"):
        validate_kernel(artifact, rows=256)


# ---- the source on a CPU, and encoders of a cache


@on_cpu
@pytest.mark.usefixtures("programs_on_cpu")
@pytest.mark.parametrize(("dim", "group", "_", "format"), quick_first(SHAPES))  # compiled anew
def test_nearest_codes_and_values_are_those_of_the_definition(dim, group, _, format):
    """In float32: of 16-bit types, the source has instructions of a GPU."""
    rows, ratios = sample(dim, torch.float32)[:3, ::4], RATIOS[[0, 1, 4]]
    for clip, ratio in ((1.0, 1.0), (ratios, ratios[:, None])):
        packed = cuda_rows.quantize(rows, clip, group, format)
        expected = int2.quantize(rows, ratio, group, format)
        assert_stored(packed, expected, format)
    assert torch.equal(cuda_rows.dequantize(packed), int2.dequantize(expected, format))


@on_cpu
@pytest.mark.usefixtures("programs_on_cpu")
def test_an_encoder_of_a_cache_says_later_that_a_row_has_no_codes():
    heads, format = sample(128, torch.float32)[:2, ::4], FORMATS["sglang"]
    rows = torch.stack([heads, heads.flip(1)])
    variant = cuda.Variant(128, 128, torch.float32, format)
    encode = cuda_encoder.clip_encoder(torch.tensor([0.96, 0.5]), variant, torch.device("cpu"))
    stored = encode(rows)
    expected = int2.quantize(rows, torch.tensor([[0.96], [0.5]]), None, format)
    assert torch.equal(int2.unpack(stored.codes, format), expected.codes)
    assert torch.equal(stored.scale, expected.scale)
    assert torch.equal(stored.offset, expected.offset)
    rows[0, 1, 7, 3] = torch.nan
    assert encode(rows).scale.isnan().nonzero().tolist() == [[0, 1, 7, 0]]
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        encode.check()
    encode.check()  # only once


# ---- the table of programs


@pytest.mark.parametrize("source", kernels.PROGRAMS)
def test_kernels_take_what_their_table_says(source):
    kernels.check(source)


def test_a_kernel_that_takes_something_else_is_named_with_what_the_table_has(monkeypatch):
    text = kernels.source_of("server_step.cu").replace("const int* lengths", "const Count* lengths")
    monkeypatch.setattr(kernels, "source_of", lambda name: text)
    problem = r"plan in server_step.cu takes Count\* lengths, where Plan has int\* lengths"
    with pytest.raises(TypeError, match=problem):
        kernels.check("server_step.cu")
