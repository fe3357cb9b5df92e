"""The kernels of `attention.cu` compiled as C++ and run on the CPU, with the code that launches
them on a GPU."""

import ctypes
import re
import struct
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch

from rotationzoo.codec import cuda_attention
from rotationzoo.codec.attention import PackedTokens
from rotationzoo.codec.cuda import Argument

HEADER = Path(__file__).with_name("warps_on_cpu.h")
# Functions in PTX, which the header has in C++. Their definitions become unused names.
IN_PTX = re.compile(
    r"(__device__ \w+ )(from_halves|from_half|half_pair|exp2_of|multiply|transpose|kept|copy_async"
    r"|read_word|read_two|read_four|read_number|end_group|wait_groups)(\()"
)
KERNELS = "prepare", "attend", "finish", "finish_many"
LAUNCH = """
extern "C" void launch_{0}(
    const unsigned* grid, int threads, const unsigned long long* arguments, int given) {{
  shared_bytes = SHARED;
  launch({0}, {{grid[0], grid[1], grid[2]}}, threads, arguments, given);
}}
"""
PAGES = """
extern "C" void set_pages(const unsigned long long* ends, int count) {
  pages.clear();
  for (int i = 0; i < count; i++) pages.push_back({ends[2 * i], ends[2 * i + 1]});
}
"""


def attend(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments, splits: int | None = None
) -> torch.Tensor:
    """What `cuda_attention.attend` returns. The queries and windows must be float32. What the
    kernels do not write is NaN."""
    packed = arguments[1]
    monkeypatch.setattr(cuda_attention, "compiled", partial(_compiled, folder, packed))
    monkeypatch.setattr(cuda_attention, "Launcher", _Launcher)
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        return cuda_attention.attend(*arguments, splits=splits)
    finally:
        torch.use_deterministic_algorithms(False)


def _compiled(
    folder: Path,
    packed: PackedTokens,
    variant: cuda_attention.AttentionVariant,
    device: torch.device,
) -> cuda_attention.Kernels:
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    text = IN_PTX.sub(r"\1ptx_\2\3", variant.source)
    text = text.replace("__shared__ alignas(128) char", "alignas(128) __shared__ char")
    launches = "".join(LAUNCH.format(name) for name in KERNELS)
    source.write_text(f'#include "{HEADER}"\n{text}{launches}{PAGES}')
    macros = [f"-D{name}={value}" for name, value in variant.macros()]
    # Shared memory has one name in every library that is loaded, and must not be one array.
    flags = ["-O1", "-std=c++17", "-fno-strict-aliasing", "-w", "-fno-gnu-unique"]
    command = ["g++", *flags, "-shared", "-fPIC", *macros, "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    functions = ctypes.CDLL(str(library))
    blocks = [*packed.key.blocks, *packed.value.blocks]
    starts = [(block.data_ptr(), block.data_ptr() + block.numel()) for block in blocks]
    ends = [end for pair in starts for end in pair]
    functions.set_pages((ctypes.c_ulonglong * len(ends))(*ends), len(blocks))
    kernels = [getattr(functions, f"launch_{name}") for name in KERNELS]
    return cuda_attention.Kernels(*kernels, threads=32 * variant.warps, blocks=8)


class _Launcher:
    """Takes the place of `cuda.Launcher`."""

    def __init__(self, device: torch.device):
        assert device.type == "cpu"

    def __call__(
        self,
        kernel: ctypes._CFuncPtr,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Iterable[Argument],
        early: bool = True,
    ) -> None:
        kept = list(arguments)
        values = [_bits(argument) for argument in kept]
        kernel((ctypes.c_uint * 3)(*grid), threads, b"".join(values), len(values))


def _bits(argument: Argument) -> bytes:
    if isinstance(argument, torch.Tensor):
        return struct.pack("q", argument.data_ptr())
    return struct.pack("d" if isinstance(argument, float) else "q", argument or 0)
