"""The codec on an NVIDIA GPU: `int2.cu` compiled and launched, with the functions of `codec.int2`.

NVIDIA's cuda.core compiles the source with NVRTC for the GPU that it finds, keeps the result in the
user's cache, and launches it on torch's stream. Unlike torch's extension builder, it needs no CUDA
toolkit, host compiler or build step. `pip install 'rotationzoo[cuda]'` installs it.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rotationzoo.codec.clip import clip_position
from rotationzoo.codec.formats import SGLANG, Format
from rotationzoo.codec.int2 import LARGEST, METADATA_TYPES, check_shape
from rotationzoo.errors import RotationZooError

SOURCE = Path(__file__).with_name("int2.cu")
FEEDBACK_SOURCE = Path(__file__).with_name("feedback.cu")
"""The second encoder, which continues the first file: both are compiled as one program."""
_PARTS_SOURCE = Path(__file__).with_name("attention_parts.cu")
ATTENTION_SOURCES = Path(__file__).with_name("attention.cu"), _PARTS_SOURCE
"""Here, too, the second file continues the first."""
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Row types that the kernels read and write -> the number that `int2.cu` uses for each."""
_LARGEST_DIM = 512
_THREADS = 128  # per block: WARPS in `int2.cu`, times 32
_FEEDBACK_ROWS = 32  # per block, and as many threads: ROWS in `feedback.cu`


@dataclass(frozen=True)
class Packed:
    """Stored rows: `codes` are bytes `[H, N, D / 4]`; `metadata` `[H, N, D / group, 2]` holds scale
    and offset in the format's type."""

    codes: torch.Tensor
    metadata: torch.Tensor
    format: Format = SGLANG


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for: the shape and type of the rows, the format, and the optional
    steps."""

    dim: int
    group: int
    dtype: torch.dtype
    format: Format = SGLANG
    clips: bool = False
    """Whether any ratio is below 1."""
    rotates: bool = False
    """Whether rows are multiplied by a matrix."""
    feedback: bool = False
    """Whether codes are chosen by error feedback, with the kernel of `feedback.cu`."""

    def macros(self) -> list[tuple[str, str]]:
        """The macros that compile the source into this variant. Raises `RotationZooError` for
        shapes and types that the kernels do not support."""
        dim, group, format = self.dim, self.group, self.format
        check_shape(dim, group)
        if dim % 16 or dim > _LARGEST_DIM or group % 4 or self.dtype not in TYPES:
            dtype = str(self.dtype).removeprefix("torch.")
            raise RotationZooError(
                f"the CUDA kernel has no rows of {dim} {dtype} in groups of {group}: it takes "
                f"multiples of 16 up to {_LARGEST_DIM} in float32, float16 or bfloat16, "
                "and groups of multiples of 4"
            )
        values = {
            "D": dim,
            "GROUP": group,
            "TYPE": TYPES[self.dtype],
            "CLIP": self.clips,
            "ROTATE": self.rotates,
            "GROUP_CLIP": format.clip_scope == "group",
            "INTERPOLATED": format.interpolated,
            "HALF": format.metadata == "float16",
            # Error feedback always makes up for the errors of what a reader gets.
            "COMPUTED": format.rounded_with == "computed" and not self.feedback,
            "MINIMUM": format.offset == "minimum",
            "STRIDED": format.packing == "strided",
        }
        return [(name, str(int(value))) for name, value in values.items()]

    @property
    def source(self) -> str:
        """The program that has the variant's kernels."""
        text = SOURCE.read_text()
        return text + FEEDBACK_SOURCE.read_text() if self.feedback else text

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _FEEDBACK_ROWS if self.feedback else _THREADS

    @property
    def block_rows(self) -> int:
        """Rows that one thread block handles, as in the source. In `int2.cu`, `lanes` threads share
        a row, and each holds runs of neighbouring channels from every quarter of it."""
        if self.feedback:
            return _FEEDBACK_ROWS
        quarter = self.dim // 4
        wide = self.dtype != torch.float32 and quarter % 8 == 0 and self.group % 8 == 0
        run = 8 if wide and not self.rotates else 4
        lanes = max(2, 1 << (quarter // run - 1).bit_length())
        rows_of_a_lane = 4 if self.rotates else 1
        return _THREADS // lanes * rows_of_a_lane


def quantize(
    rows: torch.Tensor,
    clip: float | torch.Tensor = 1.0,
    group_size: int | None = None,
    format: Format = SGLANG,
    rotation: torch.Tensor | None = None,
    rotated: torch.Tensor | None = None,
) -> Packed:
    """Quantize and pack rows `[H, N, D]` on a GPU, as `int2.quantize` and `int2.pack` do.

    `clip` is one ratio, or one per head `[H]`. `rotation` `[H, D, D]`, if given, multiplies the
    rows first; `rotated` `[H, N, D]` float32 receives the products. Raises `RotationZooError` for
    rows that are not finite or above 1e18, and for shapes and types that the kernel does not
    support.
    """
    if format.bisected:
        raise RotationZooError(
            "the CUDA reference sorts: it has no bisected threshold", hint="use int2.quantize"
        )
    heads, count, dim = rows.shape
    group, device = group_size or dim, rows.device
    ratios = torch.as_tensor(clip)
    channels = group if format.clip_scope == "group" else dim
    entry, weight = clip_position(ratios.expand(heads), channels, format.interpolated)
    matrix = None if rotation is None else rotation.float().contiguous()
    clips = bool((ratios < 1).any())
    kernel = compiled(
        "quantize", Variant(dim, group, rows.dtype, format, clips, matrix is not None), device
    )
    positions = entry.int().to(device), weight.to(device)
    packed, refused = empty_packed(rows, group, format)
    stored = packed.codes, packed.metadata
    kernel(rows.contiguous(), count, matrix, *positions, *stored, rotated, refused)
    check_refused(refused)
    return packed


def empty_packed(rows: torch.Tensor, group: int, format: Format) -> tuple[Packed, torch.Tensor]:
    """Room for what a kernel stores of rows `[H, N, D]`, and its flag for rows that it refuses."""
    heads, count, dim = rows.shape
    codes = rows.new_empty(heads, count, dim // 4, dtype=torch.uint8)
    metadata_type = METADATA_TYPES[format.metadata]
    metadata = rows.new_empty(heads, count, dim // group, 2, dtype=metadata_type)
    return Packed(codes, metadata, format), rows.new_zeros((), dtype=torch.int32)


def check_refused(refused: torch.Tensor) -> None:
    """Raise `RotationZooError` if a kernel has refused a row."""
    # Reading the flag waits for the kernel, so that a call reports its own rows.
    if refused.item():
        raise RotationZooError(
            f"a row to be quantized is not finite or exceeds {LARGEST:.0e}",
            hint="run the model with --dtype float32",
        )


def dequantize(
    packed: Packed, dtype: torch.dtype = torch.float32, rotation: torch.Tensor | None = None
) -> torch.Tensor:
    """Restore rows `[H, N, D]` as `int2.dequantize` does, rounded to `dtype`. A given `rotation` is
    undone by multiplying with its transpose."""
    heads, count, bytes_of_a_row = packed.codes.shape
    dim, groups, device = 4 * bytes_of_a_row, packed.metadata.shape[2], packed.codes.device
    rows = torch.empty(heads, count, dim, dtype=dtype, device=device)
    matrix = None if rotation is None else rotation.float().mT.contiguous()
    variant = Variant(dim, dim // groups, dtype, packed.format, rotates=matrix is not None)
    kernel = compiled("dequantize", variant, device)
    kernel(packed.codes, packed.metadata, count, matrix, rows)
    return rows


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel on one GPU. It is launched on torch's current stream there, without waiting
    for the result."""

    function: Any
    block_rows: int
    threads: int

    def __call__(self, *arguments: torch.Tensor | int | None) -> None:
        """Launch with the arguments of the function in the source. The first is a tensor
        `[H, ...]`, the only integer is the number of rows, and None is a null pointer."""
        from cuda.core import LaunchConfig, Stream, launch

        first = arguments[0]
        assert isinstance(first, torch.Tensor)
        if not first.numel():  # CUDA refuses an empty grid
            return
        count = next(argument for argument in arguments if isinstance(argument, int))
        grid = (-(-count // self.block_rows), first.shape[0])
        pointers = [_pointer(argument) for argument in arguments]
        # `current_stream` refers to the current GPU, which need not be the one that holds the rows.
        with torch.cuda.device(first.device):
            stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
            launch(stream, LaunchConfig(grid=grid, block=self.threads), self.function, *pointers)


def _pointer(argument: torch.Tensor | int | None) -> int:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument or 0


@cache
def compiled(name: str, variant: Variant, device: torch.device) -> Kernel:
    """The variant's kernel of this name, compiled for this GPU or taken from the cache.

    Raises `RotationZooError` where cuda.core or NVRTC is missing, and for shapes and types that the
    kernel does not support.
    """
    code = build(variant.source, tuple(variant.macros()), device)
    return Kernel(code.get_kernel(name), variant.block_rows, variant.threads)


@cache
def build(source: str, macros: tuple[tuple[str, str], ...], device: torch.device) -> Any:
    """A program compiled with these macros for this GPU, or taken from the cache: cuda.core's
    object code, whose `get_kernel` takes a name. Raises `RotationZooError` where cuda.core or NVRTC
    is missing."""
    # Imported here because the package is optional.
    try:
        from cuda.core import Device, Program, ProgramOptions
        from cuda.core.utils import FileStreamProgramCache
    except ImportError as error:
        raise RotationZooError(
            "the CUDA kernels need NVIDIA's cuda.core",
            hint="install it with: pip install 'rotationzoo[cuda]'",
        ) from error
    with torch.cuda.device(device):
        gpu = Device(torch.cuda.current_device())
        gpu.set_current()
        options = ProgramOptions(arch=f"sm_{gpu.arch}", std="c++17", define_macro=[*macros])
        with FileStreamProgramCache() as programs:
            return Program(source, "c++", options).compile("cubin", cache=programs)
