"""The CUDA encoders whose threads exchange numbers, run on a CPU: equal to their definitions.
tests/codec/test_cuda_feedback.py runs the one whose threads do not."""

import ctypes
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from support.codec import assert_stored, compile_for_cpu, on_cpu

from rotationzoo.checks.comparison import draw_rows, edge_rows
from rotationzoo.codec import cuda, cuda_encoder, feedback, int2
from rotationzoo.codec.formats import FINE
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.error_feedback import factorize

LAUNCH = """
extern "C" void run(
    const unsigned* grid, int threads, const unsigned long long* arguments, int given) {{
  launch({0}, {{grid[0], grid[1], grid[2]}}, threads, arguments, given);
}}
"""
SYMMETRIC = replace(FINE, fine_channels=0)
# Every way to lay out a row, with and without third bits: a whole row of them, some that end
# within a word of 32, and groups that hold coarse and fine channels.
CASES = [
    (128, 128, FINE), (128, 64, replace(FINE, fine_channels=80)),
    (80, 80, replace(FINE, fine_channels=16)), (96, 96, replace(FINE, fine_channels=96)),
    (64, 32, replace(FINE, packing="consecutive")), (64, 64, SYMMETRIC),
    (64, 64, int2.SGLANG), (64, 32, int2.FORMATS["mlx"]),
]  # fmt: skip
# Each case is compiled anew; one with third bits and one with an offset tell most.
FEW = [
    pytest.param(*case, marks=[pytest.mark.thorough] * (case not in (CASES[0], CASES[6])))
    for case in CASES
]


@dataclass
class CpuKernel:
    """Takes the place of `cuda.Kernel`."""

    library: ctypes.CDLL
    block_rows: int
    threads: int

    def __call__(self, *arguments: torch.Tensor | int | None) -> None:
        count = next(each for each in arguments if isinstance(each, int))
        grid = -(-count // self.block_rows), len(arguments[0]), 1
        values = [
            each.data_ptr() if isinstance(each, torch.Tensor) else each or 0 for each in arguments
        ]
        data = struct.pack(f"{len(values)}q", *values)
        self.library.run((ctypes.c_uint * 3)(*grid), self.threads, data, len(values))


@pytest.fixture
def source_on_cpu(monkeypatch, tmp_path):
    """Compiles kernels for the CPU in place of a GPU."""

    def compiled(name: str, variant: cuda.Variant, device: torch.device) -> CpuKernel:
        folder = tmp_path / f"{name} {len(list(tmp_path.iterdir()))}"
        library = compile_kernel(name, variant, folder)
        if name == cuda.FEW:
            return CpuKernel(library, 1, 128)
        return CpuKernel(library, variant.block_rows, variant.threads)

    monkeypatch.setattr(cuda, "compiled", compiled)


def compile_kernel(name: str, variant: cuda.Variant, folder: Path) -> ctypes.CDLL:
    folder.mkdir()
    source = variant.source.replace("1.0f / 0.0f", "HUGE_VALF") + LAUNCH.format(name)
    macros = [*variant.macros(), ("SHARED", "0")]
    return compile_for_cpu(folder, "warps_on_cpu.h", source, macros, "-ffp-contract=off")


def sample(dim: int) -> torch.Tensor:
    """Two heads of 30 rows with tails and of edge rows."""
    edges = edge_rows(dim, int2.LARGEST * 0.99).expand(2, -1, -1)
    return torch.cat([edges, draw_rows(None, 2, 30, dim, seed=dim)], dim=1)


@on_cpu
@pytest.mark.parametrize(("dim", "group", "format"), CASES)
def test_nearest_codes_and_values_are_those_of_the_definition(dim, group, format, source_on_cpu):
    rows = sample(dim)
    for clip in (1.0, torch.tensor([0.96, 0.5])):
        packed = cuda_encoder.quantize(rows, clip, group, format)
        ratio = clip[:, None] if isinstance(clip, torch.Tensor) else clip
        expected = int2.quantize(rows, ratio, group, format)
        assert_stored(packed, expected, format)
    assert torch.equal(cuda.dequantize(packed), int2.dequantize(expected, format))


@on_cpu
@pytest.mark.parametrize(("dim", "group", "format"), FEW)
def test_few_rows_with_feedback_are_those_of_the_definition(dim, group, format, source_on_cpu):
    rows = sample(dim)
    normal = torch.randn(2, 2 * dim, dim, generator=torch.Generator().manual_seed(dim)).double()
    factor = factorize(normal.mT @ normal / dim)
    packed = cuda_encoder.quantize_with_feedback(rows, factor, group, format)
    assert_stored(packed, feedback.quantize(rows, factor, group, format), format)


@on_cpu
def test_an_encoder_of_a_cache_has_third_bits_behind_the_codes(source_on_cpu):
    rows = sample(64)[None]
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
