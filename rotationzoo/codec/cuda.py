"""`int2.cu` compiled and launched: the functions of `rotationzoo.int2` on an NVIDIA GPU.

NVIDIA's own cuda.core compiles the one source file with NVRTC for the GPU it finds, keeps the
result in the user's cache, and launches it on torch's stream. So no CUDA toolkit, host compiler or
build step is needed, which torch's extension builder would; the packages come with `pip install
'rotationzoo[cuda]'`.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rotationzoo.codec.int2 import LARGEST, SGLANG, Format, check_shape, clip_position
from rotationzoo.errors import RotationZooError

SOURCE = Path(__file__).with_name("int2.cu")
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_THREADS, _LARGEST_DIM = 128, 512


@dataclass(frozen=True)
class Packed:
    """Stored rows: bytes `[H, N, D / 4]`, and `[H, N, D / group, 2]` scale and offset in the
    format's type."""

    codes: torch.Tensor
    metadata: torch.Tensor
    format: Format = SGLANG


def quantize(
    rows: torch.Tensor,
    clip: float | torch.Tensor = 1.0,
    group_size: int | None = None,
    format: Format = SGLANG,
    rotation: torch.Tensor | None = None,
    rotated: torch.Tensor | None = None,
) -> Packed:
    """Rows `[H, N, D]` on a GPU -> what `int2.quantize` and `int2.pack` make of them.

    `clip` is a ratio or one for each head, `[H]`; `rotation` `[H, D, D]`, if given, multiplies the
    rows first, and `rotated` `[H, N, D]` float32 receives the products. Raises `RotationZooError`
    for rows that are not finite or above 1e18, and for shapes and types that the kernel does not
    take.
    """
    if format.bisected:
        raise RotationZooError(
            "the CUDA reference sorts: it has no bisected threshold", hint="use int2.quantize"
        )
    heads, count, dim = rows.shape
    group = group_size or dim
    channels = group if format.clip_scope == "group" else dim
    positions = clip_position(torch.as_tensor(clip).expand(heads), channels, format.interpolated)
    rank, weight = positions[0].int().to(rows.device), positions[1].to(rows.device)
    codes = torch.empty(heads, count, dim // 4, dtype=torch.uint8, device=rows.device)
    metadata = torch.empty(heads, count, dim // group, 2, dtype=format.metadata, device=rows.device)
    refused = torch.zeros((), dtype=torch.int32, device=rows.device)
    clips = bool((torch.as_tensor(clip) < 1).any())
    matrix = None if rotation is None else rotation.float().contiguous()
    kernel = compiled(
        "quantize", dim, group, rows.dtype, format, clips, rotation is not None, rows.device
    )
    kernel(rows.contiguous(), count, matrix, rank, weight, codes, metadata, rotated, refused)
    if refused.item():
        raise RotationZooError(
            f"a row to be quantized is not finite or exceeds {LARGEST:.0e}",
            hint="run the model with --dtype float32",
        )
    return Packed(codes, metadata, format)


def dequantize(
    packed: Packed, dtype: torch.dtype = torch.float32, rotation: torch.Tensor | None = None
) -> torch.Tensor:
    """What `int2.dequantize` makes of the rows, `[H, N, D]`, rounded to `dtype`; times the
    transposed `rotation` if given."""
    heads, count, quarter = packed.codes.shape
    dim, groups = 4 * quarter, packed.metadata.shape[2]
    rows = torch.empty(heads, count, dim, dtype=dtype, device=packed.codes.device)
    matrix = None if rotation is None else rotation.float().mT.contiguous()
    group, device = dim // groups, packed.codes.device
    kernel = compiled(
        "dequantize", dim, group, dtype, packed.format, False, rotation is not None, device
    )
    kernel(packed.codes, packed.metadata, count, matrix, rows)
    return rows


@dataclass(frozen=True)
class Kernel:
    """One compiled function of one GPU, launched on torch's current stream there without waiting
    for it."""

    function: Any
    block_rows: int

    def __call__(self, *arguments: torch.Tensor | int | None) -> None:
        from cuda.core import LaunchConfig, Stream, launch

        first, count = arguments[0], next(a for a in arguments if isinstance(a, int))
        assert isinstance(first, torch.Tensor)
        if not first.numel():
            return
        grid = (-(-count // self.block_rows), first.shape[0])
        pointers = (a.data_ptr() if isinstance(a, torch.Tensor) else a or 0 for a in arguments)
        with torch.cuda.device(
            first.device
        ):  # the default stream is that of whichever GPU is current
            stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
            launch(stream, LaunchConfig(grid=grid, block=_THREADS), self.function, *pointers)


@cache
def compiled(
    name: str,
    dim: int,
    group: int,
    dtype: torch.dtype,
    format: Format,
    clips: bool,
    rotates: bool,
    device: torch.device,
) -> Kernel:
    """The kernel `quantize` or `dequantize` for these shapes, compiled for this GPU or taken from
    the cache.

    Raises `RotationZooError` where cuda.core or NVRTC is missing, and for shapes and types that the
    kernel does not take.
    """
    macros = definitions(dim, group, dtype, format, clips, rotates)
    try:
        from cuda.core import Device, Program, ProgramOptions
        from cuda.core.utils import FileStreamProgramCache
    except ImportError as error:
        raise RotationZooError(
            "the CUDA kernels need NVIDIA's cuda.core",
            hint="install it with: pip install 'rotationzoo[cuda]'",
        ) from error
    run = 4 if rotates or dtype == torch.float32 or dim // 4 % 8 or group % 8 else 8
    lanes = max(2, 1 << (dim // 4 // run - 1).bit_length())
    with torch.cuda.device(device):
        gpu = Device(torch.cuda.current_device())
        gpu.set_current()
        options = ProgramOptions(arch=f"sm_{gpu.arch}", std="c++17", define_macro=macros)
        with FileStreamProgramCache() as programs:
            code = Program(SOURCE.read_text(), "c++", options).compile("cubin", cache=programs)
        return Kernel(code.get_kernel(name), _THREADS // lanes * (4 if rotates else 1))


def definitions(
    dim: int, group: int, dtype: torch.dtype, format: Format, clips: bool, rotates: bool
) -> list[tuple[str, str]]:
    """The macros that make `int2.cu` the kernel for these shapes."""
    check_shape(dim, group)
    if dim % 16 or dim > _LARGEST_DIM or group % 4 or dtype not in TYPES:
        raise RotationZooError(
            f"the CUDA kernel has no rows of {dim} {str(dtype).removeprefix('torch.')} in groups of {group}: it takes "
            f"multiples of 16 up to {_LARGEST_DIM} in float32, float16 or bfloat16, and groups of multiples of 4"
        )
    values = {
        "D": dim, "GROUP": group, "TYPE": TYPES[dtype], "CLIP": clips, "ROTATE": rotates,
        "GROUP_CLIP": format.clip_scope == "group", "INTERPOLATED": format.interpolated,
        "HALF": format.metadata == torch.float16, "COMPUTED": format.rounded_with == "computed",
        "MINIMUM": format.offset == "minimum", "STRIDED": format.packing == "strided",
    }  # fmt: skip
    return [(name, str(int(value))) for name, value in values.items()]
