"""The kernel of error feedback compiled as C++ and run on the CPU, thread after thread."""

import ctypes
import re
import subprocess
from pathlib import Path

import torch

from rotationzoo.codec import cuda, int2

HEADER = Path(__file__).with_suffix(".h")
# Functions of int2.cu in PTX, which the header has in C++. Their definitions become unused names.
IN_PTX = re.compile(r"(__device__ \w+ )((?:from|to)_half|(?:min|max)_nan)(\()")
LAUNCH = """
extern "C" void launch(
    const Element* rows, long long count, int heads, int blocks, const float* factors,
    unsigned char* codes, Metadata* metadata, int* refused) {
  for (blockIdx.y = 0; blockIdx.y < heads; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
      for (threadIdx.x = 0; threadIdx.x < ROWS; threadIdx.x++)
        quantize_with_feedback(rows, count, factors, codes, metadata, refused);
}
"""


def quantize(
    folder: Path, rows: torch.Tensor, factor: torch.Tensor, group: int, format: int2.Format
) -> tuple[cuda.Packed, bool]:
    """What `cuda_encoder.quantize_with_feedback` stores, and whether the kernel refuses a row."""
    heads, count, dim = rows.shape
    variant = cuda.Variant(dim, group, rows.dtype, format, feedback=True)
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    renamed = IN_PTX.sub(r"\1ptx_\2\3", variant.source).replace("1.0f / 0.0f", "HUGE_VALF")
    source.write_text(f'#include "{HEADER}"\n{renamed}{LAUNCH}')
    macros = [f"-D{name}={value}" for name, value in variant.macros()]
    flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
    # Shared memory has one name in every library that is loaded, and must not be one array.
    flags += ["-shared", "-fPIC", "-fno-gnu-unique"]
    command = ["g++", *flags, *macros, "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packed = cuda.empty_packed(rows, group, format)
    refused = cuda.unset_flag(rows.device)
    rows, factor = rows.contiguous(), factor.contiguous()
    tensors = rows, factor, packed.codes, packed.metadata, refused
    first, *others = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    blocks = -(-count // variant.block_rows)
    ctypes.CDLL(str(library)).launch(first, ctypes.c_longlong(count), heads, blocks, *others)
    return packed, bool(refused)
