"""Marks of tests that need a GPU, or a compiler that makes CUDA sources run on a CPU."""

import ctypes
import mmap
import os
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rotationzoo.codec import cuda, cuda_segments, int2, kernels
from rotationzoo.codec.formats import SGLANG, Format
from rotationzoo.vllm import latents, pages, prompts, steps
from support.places import TESTS

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU = [pytest.param("cuda", marks=gpu)]
on_gpu = pytest.mark.parametrize("device", ON_GPU)
on_cpu = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux" or not shutil.which("g++"),
    reason="needs GNU's compiler on Linux and x86",
)


_LAUNCH = """
extern "C" void launch_{0}(
    const unsigned* grid, int threads, const unsigned long long* arguments, int given,
    unsigned shared) {{
  if (shared && shared != SHARED) fail("bytes of shared memory, of these", SHARED);
  shared_bytes = SHARED;
  launch<{0}>({{grid[0], grid[1], grid[2]}}, threads, arguments, given);
}}
"""


def compile_for_cpu(
    folder: Path,
    source: str,
    kernels: Iterable[str],
    macros: Iterable[tuple[str, str]],
    *flags: str,
    in_ptx: str = "from_half|to_half|min_nan|max_nan|pack_pair",
) -> ctypes.CDLL:
    """A library of CUDA source that is compiled for the CPU, with a function `launch_NAME` for each
    of the kernels. `warps_on_cpu.h` has the functions `in_ptx` in C++: their definitions in PTX
    become unused names."""
    text = re.sub(rf"(__device__ \w+ )({in_ptx})(\()", r"\1ptx_\2\3", source)
    text += "".join(_LAUNCH.format(name) for name in kernels)
    file, library = folder / "kernel.cpp", folder / "kernel.so"
    file.write_text(f'#include "{TESTS / "support" / "warps_on_cpu.h"}"\n{text}')
    defined = [f"-D{name}={value}" for name, value in macros]
    # Shared memory has one name in every library that is loaded, and must not be one array.
    flags = ("-O1", "-std=c++17", "-fno-strict-aliasing", "-w", "-fno-gnu-unique", *flags)
    # As on a GPU, a read that is not aligned ends the process.
    flags = (*flags, "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    command = ["g++", *flags, "-shared", "-fPIC", *defined, "-o", str(library), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


_TYPES = {
    "int*": torch.int32,
    "Count*": torch.int64,
    "Address*": torch.int64,
    "unsigned long long*": torch.int64,
    "float*": torch.float32,
    "Header*": torch.float32,
    "float2*": torch.float32,
    "int4*": torch.int32,
    "signed char*": torch.int8,
}
"""Pointers to numbers of one type; others are compiled for what they point to, or are bytes."""
_TAKEN = {name: taken for table in kernels.PROGRAMS.values() for name, taken in table.items()}


class CpuLauncher:
    """Takes the place of `cuda.Launcher`. A kernel that reads or writes beyond the end of a
    tensor's memory ends the process, as it may on a GPU."""

    def __init__(self, device: torch.device):
        assert device.type == "cpu"

    def __call__(
        self,
        kernel: Callable[..., None],
        grid: tuple[int, int, int],
        threads: int,
        arguments: tuple,
        early: bool = True,
        shared: int = 0,
    ) -> None:
        assert type(arguments) is _TAKEN[kernel.__name__.removeprefix("launch_")]
        with ExitStack() as stack:
            moved: dict[int, int] = {}
            values = []
            for field, argument in zip(
                kernels.fields_of(type(arguments)), flatten(arguments), strict=True
            ):
                if isinstance(argument, torch.Tensor):
                    type_name = field.rpartition(" ")[0]
                    assert argument.dtype == _TYPES.get(type_name, argument.dtype), field
                    memory = argument.untyped_storage()
                    if memory.data_ptr() not in moved:
                        moved[memory.data_ptr()] = stack.enter_context(_before_a_fence(memory))
                    offset = argument.data_ptr() - memory.data_ptr()
                    argument = moved[memory.data_ptr()] + offset
                kind = "d" if isinstance(argument, float) else "q"
                values.append(struct.pack(kind, argument or 0))
            kernel((ctypes.c_uint * 3)(*grid), threads, b"".join(values), len(values), shared)


def flatten(arguments: tuple) -> Iterator:
    """The arguments of a kernel, without groups."""
    for argument in arguments:
        yield from flatten(argument) if isinstance(argument, tuple) else [argument]


@contextmanager
def _before_a_fence(memory: torch.UntypedStorage) -> Iterator[int]:
    """The address of a copy, copied back afterwards, that ends where nobody may read. Kernels read
    16 bytes at a time, so that up to 15 bytes lie between."""
    size, page = memory.nbytes(), mmap.PAGESIZE
    room = -(-size // page) * page
    aligned = -(-size // 16) * 16
    pages = mmap.mmap(-1, room + page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    fence, address = ctypes.c_void_p(base + room), base + room - aligned
    assert libc.mprotect(fence, ctypes.c_size_t(page), 0) == 0, os.strerror(ctypes.get_errno())
    ctypes.memmove(address, memory.data_ptr(), size)
    try:
        yield address
    finally:
        ctypes.memmove(memory.data_ptr(), address, size)


_PAGES = """
extern "C" void set_pages(const unsigned long long* ends, int count) {
  pages.clear();
  for (int i = 0; i < count; i++) pages.push_back({ends[2 * i], ends[2 * i + 1]});
}
"""
_OF_ATTENTION = (
    "from_half|half_pair|exp2_of|multiply|multiply_bfloat16|bfloat16_pair|transpose|kept|copy_async"
    "|read_word|read_two|read_four|read_number|end_group|wait_groups|meet|arrive|publish"
    "|begin_products|end_products|wait_products|hold|multiply_rows|multiply_values|multiply_own|multiply_keys"
    "|take_registers|return_registers|prefetch_line"
)


@pytest.fixture(scope="session")
def compile_program(tmp_path_factory) -> Callable[[str, tuple], ctypes.CDLL]:
    """Compiles a program of `kernels.PROGRAMS` for the CPU, once with the same macros."""

    @cache
    def compile(source: str, macros: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
        text = kernels.read(source).replace("1.0f / 0.0f", "HUGE_VALF")
        text = text.replace("__shared__ alignas(128) char", "alignas(128) __shared__ char")
        text = text.replace("extern __shared__ uint4 memory[]", "static uint4 memory[SHARED / 16]")
        text = text.replace(
            "extern __shared__ __align__(1024) char memory[]",
            "static uint4 room[SHARED / 16];\nstatic char* memory = reinterpret_cast<char*>(room)",
        )
        if source in ("attention.cu", "latents.cu", "many_heads.cu"):
            text, options = text + _PAGES, {"in_ptx": _OF_ATTENTION}
        else:
            macros, options = (*macros, ("SHARED", "0")), {}
        names, folder = kernels.PROGRAMS[source], tmp_path_factory.mktemp("program")
        return compile_for_cpu(folder, text, names, macros, "-ffp-contract=off", **options)

    return compile


@pytest.fixture
def programs_on_cpu(monkeypatch, compile_program) -> None:
    """Programs are compiled for the CPU in place of a GPU, and launched there."""

    def build(source: str, macros: Iterable, device: torch.device) -> SimpleNamespace:
        library = compile_program(source, tuple(macros))
        return SimpleNamespace(get_kernel=lambda name: getattr(library, f"launch_{name}"))

    for module in (cuda, cuda_segments, latents, pages, prompts, steps):
        monkeypatch.setattr(module, "build", build, raising=False)
        monkeypatch.setattr(module, "Launcher", CpuLauncher)
    for module in (cuda, cuda_segments):
        monkeypatch.setattr(module, "run_beside", lambda kernel, device: None)


RATIOS = st.sampled_from([1.0, 0.96, 0.92, 0.5, 0.03])
many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
some = settings(many, max_examples=20)
"""For a test of a dozen formats, each of which draws its own."""


def restore(
    rows: torch.Tensor,
    clip: float | torch.Tensor = 1.0,
    group_size: int | None = None,
    format: Format = SGLANG,
) -> torch.Tensor:
    """Rows stored with nearest codes, as a reader restores them."""
    return int2.dequantize(int2.quantize(rows, clip, group_size, format), format)


@st.composite
def shapes(draw) -> tuple[int, int]:
    """Row length and group size."""
    dim = draw(st.sampled_from([8, 16, 48, 64, 80, 128]))
    divisors = [size for size in range(4, dim + 1, 4) if dim % size == 0]
    return dim, draw(st.sampled_from(divisors))


@st.composite
def rows(draw, largest: float = 100.0) -> tuple[torch.Tensor, int]:
    """A few rows `[N, D]` with ties, zeros and subnormals among them, and a group size."""
    dim, group = draw(shapes())
    count = draw(st.integers(1, 3))
    values = st.floats(-largest, largest, width=32)
    return torch.from_numpy(draw(arrays(np.float32, (count, dim), elements=values))), group


def assert_stored(packed: cuda.Packed, expected: int2.Quantized, format: Format) -> None:
    """Compare what a kernel stored with what the definition stores, bit by bit and part by part."""
    assert torch.equal(packed.codes.cpu(), int2.pack(expected.codes, format).cpu())
    numbers = expected.scale, expected.offset
    for number, actual in zip(numbers, packed.metadata.cpu().unbind(-1), strict=True):
        wanted = number.cpu().contiguous().view(torch.uint8)
        assert torch.equal(actual.contiguous().view(torch.uint8), wanted), "scale or offset"


def largest(rows: torch.Tensor) -> torch.Tensor:
    """The largest magnitude `[..., 1]` of each row."""
    return rows.abs().amax(-1, keepdim=True)


# One front end serves the three: the sources ask for no generation, but for attention.cu.
GENERATIONS = "-gencode=arch=compute_80,code=[sm_80,sm_90,sm_100]"
# What compiles at all is compiled in half the time without optimization.
ONLY_COMPILE = "-gencode=arch=compute_90,code=sm_90", "-Ofc=max"


def compile_kernels(
    text: str, macros: Iterable[tuple[str, str]], folder: Path, options: Iterable[str]
) -> str:
    """What nvcc writes when it compiles a source with these macros, which must be no warning."""
    source = folder / "kernels.cu"
    source.write_text(text)
    defined = [f"-D{name}={value}" for name, value in macros]
    files = ["-o", str(folder / "out"), str(source)]
    command = ["nvcc", "-fatbin", "-Xptxas=-v", *options, *defined, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return done.stderr
