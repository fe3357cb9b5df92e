"""The CUDA codec: compiled for three GPU generations where nvcc is there, and equal to its
definition where a GPU is."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.codec import assert_stored, on_gpu, spilled_registers

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.comparison import edge_rows
from rotationzoo.checks.kernel import validate_kernel
from rotationzoo.codec import cuda, cuda_encoder, cuda_rows, int2
from rotationzoo.codec.formats import FINE
from rotationzoo.errors import RotationZooError

ONE_SCALE = replace(FINE, fine_channels=0)
FORMATS = int2.FORMATS | {
    "fine": FINE,
    "one scale": ONE_SCALE,
    "4 bits": replace(ONE_SCALE, bits=4),
}
FORMATS |= {"8 bits": replace(int2.FORMATS["vllm"], bits=8)}
# Every type, format, and way to split a row among lanes at least once, clipped, with and without a
# rotation.
COMPILED = [
    (128, 128, torch.bfloat16, "sglang", False), (128, 128, torch.bfloat16, "sglang", True),
    (64, 32, torch.float16, "vllm", False), (80, 80, torch.float32, "mlx", True),
    (96, 96, torch.bfloat16, "mlx", False), (192, 64, torch.float16, "sglang", True),
    (256, 128, torch.bfloat16, "vllm", True), (512, 32, torch.float32, "sglang", False),
    (128, 128, torch.float32, "fine", False), (128, 64, torch.bfloat16, "fine", True),
    (128, 128, torch.bfloat16, "4 bits", False), (128, 32, torch.float16, "8 bits", False),
]  # fmt: skip


VARIANTS = [
    pytest.param(
        cuda.Variant(dim, group, dtype, FORMATS[format], clips=True, rotates=rotates),
        marks=pytest.mark.thorough,
    )
    for dim, group, dtype, format, rotates in COMPILED
]
VARIANTS.append(cuda.Variant(64, 4, torch.float16, FORMATS["sglang"], feedback=True))


@pytest.mark.skipif(
    not shutil.which("nvcc"), reason="needs nvcc to compile for sm_80, sm_90 and sm_100"
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_register_is_spilled(variant, tmp_path):
    spills = spilled_registers(variant, tmp_path)
    kernels = 4 if variant.feedback else 2
    assert len(spills) == kernels * 3, "each kernel for three targets"
    assert all(", 0 bytes spill stores, 0 bytes spill loads" in line for line in spills), spills


def test_shapes_that_the_kernel_does_not_take_are_refused():
    float32, float64 = torch.float32, torch.float64
    for dim, group, dtype in ((72, 72, float32), (1024, 128, float32), (64, 64, float64)):
        with pytest.raises(RotationZooError, match="the CUDA kernel has no rows of"):
            cuda.Variant(dim, group, dtype, clips=True).macros()
    three = replace(FORMATS["sglang"], bits=3)
    assert not cuda_encoder.supports(cuda.Variant(64, 64, torch.float32, three))
    for format in (three, replace(FINE, fine_channels=8), replace(FINE, bits=4)):
        with pytest.raises(RotationZooError, match="third bits of a multiple of 16 channels"):
            cuda.Variant(64, 64, torch.float32, format).macros()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without cuda.core")
def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    variant = cuda.Variant(64, 64, torch.bfloat16, clips=True)
    with pytest.raises(RotationZooError, match=r"need NVIDIA's cuda\.core") as failure:
        cuda.compiled("quantize", variant, torch.device("cuda", 0))
    assert "cuda-core" in failure.value.hint


def sample(dim: int, dtype: torch.dtype, count: int = 203) -> torch.Tensor:
    """Two heads of rows with tails, behind edge rows."""
    generator = torch.Generator().manual_seed(dim)
    largest = min(int2.LARGEST, torch.finfo(dtype).max) * 0.99
    edges = edge_rows(dim, largest).expand(2, -1, -1)
    normal = torch.randn(2, count, dim, generator=generator)
    spread = normal * torch.randn(2, count, 1, generator=generator).exp()
    return torch.cat([edges, spread], dim=1).to(dtype)


@on_gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("dim", "group"), [(64, 32), (80, 80), (112, 112), (128, 128), (192, 64), (512, 128)]
)
@pytest.mark.parametrize("dtype", cuda.TYPES, ids=str)
def test_codes_and_values_are_those_of_the_definition(device, dim, group, dtype, format):
    rows = sample(dim, dtype)
    for clip in (1.0, torch.tensor([0.96, 0.5])):
        packed = cuda_rows.quantize(rows.to(device), clip, group, FORMATS[format])
        ratio = clip[:, None] if isinstance(clip, torch.Tensor) else clip
        expected = int2.quantize(rows, ratio, group, FORMATS[format])
        assert_stored(packed, expected, FORMATS[format])
        definition = int2.dequantize(expected, FORMATS[format])
        for dtype_back in cuda.TYPES:
            values = cuda_rows.dequantize(packed, dtype_back).cpu()
            wanted = definition.to(dtype_back)
            assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))


@on_gpu
@pytest.mark.parametrize("dim", [80, 128, 256])
def test_rotating_in_the_kernel(device, dim):
    rows = sample(dim, torch.bfloat16)[:, 8:]
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
@pytest.mark.parametrize("number", [math.nan, math.inf, -2e18])
def test_rows_outside_the_domain_are_refused(device, number):
    rows = torch.ones(1, 300, 128, dtype=torch.bfloat16)
    rows[0, 217, 100] = number
    for clip in (1.0, 0.9):
        with pytest.raises(RotationZooError, match="not finite or exceeds"):
            cuda_rows.quantize(rows.to(device), clip)


@on_gpu
def test_the_definition_is_the_same_on_a_gpu(device):
    rows = sample(128, torch.float32)
    for format in FORMATS.values():
        on_cpu = int2.quantize(rows, 0.92, 32, format)
        on_device = int2.quantize(rows.to(device), 0.92, 32, format)
        assert torch.equal(on_cpu.codes, on_device.codes.cpu())
        assert torch.equal(on_cpu.scale, on_device.scale.cpu())
        assert torch.equal(on_cpu.offset, on_device.offset.cpu())
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
    program = Program(cuda.SOURCE.read_text() + EVERY, "c++", options)
    kernel = program.compile("cubin").get_kernel("every")
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    grid = LaunchConfig(grid=(1 << 23) // 256, block=256)
    launch(stream, grid, kernel, np.int32(bits), wrong.data_ptr())
    assert wrong.item() == 0


@on_gpu
def test_validation_of_an_artifact(device, made, tmp_path):
    artifact = Artifact.open(shutil.copytree(made, tmp_path / "artifact"))
    report = validate_kernel(artifact, rows=64)
    assert report["on_gpu"]
    assert report["codes_equal"]
    card = (artifact.folder / "README.md").read_text()
    assert "`int2.cu` gave codes and values bit-equal to the definition" in card
    assert Artifact.open(artifact.folder).damaged_files() == []


@on_gpu
def test_a_kernel_that_differs_is_found(device, made, tmp_path, monkeypatch):
    wrong = tmp_path / "wrong.cu"
    wrong.write_text(
        cuda.SOURCE.read_text().replace(
            "by.divide(x), offset), 0.5f)", "by.divide(x), offset), 0.49f)"
        )
    )
    monkeypatch.setattr(cuda, "SOURCE", wrong)
    cuda.compiled.cache_clear()
    artifact = Artifact.open(shutil.copytree(made, tmp_path / "artifact"))
    try:
        with pytest.raises(
            RotationZooError,
            match=r"layers\.0\.key, head \d, row \d+: the kernel's code is \d and the",
        ):
            validate_kernel(artifact, rows=256)
    finally:
        cuda.compiled.cache_clear()
