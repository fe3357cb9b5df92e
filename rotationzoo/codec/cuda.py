"""How the kernels of `codec.kernels` are compiled and launched on an NVIDIA GPU, and the variants
of `int2.cu`.

NVIDIA's cuda.core compiles a source with NVRTC for the GPU that it finds, keeps the result in the
user's cache, and launches it on torch's stream. Unlike torch's extension builder, it needs no CUDA
toolkit, host compiler or build step. The extra `cuda` installs it.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from rotationzoo.codec import kernels
from rotationzoo.codec.formats import SGLANG, Format
from rotationzoo.codec.int2 import check_shape
from rotationzoo.errors import RotationZooError

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Row types of the kernels -> their numbers in `int2.cu`."""
_WARP = 32
THREADS = 128
"""Of a block: WARPS in `int2.cu`, times 32."""
INSTALL = "pip install 'cuda-bindings>=13,<14' 'cuda-core>=1' 'nvidia-cuda-nvrtc>=13,<14'"
_EARLY = "programmatic_stream_serialization"
_WAITING_GPU = 9, 0  # the compute capability from which on `wait_for_previous` is an instruction


@cache
def build(
    source: str, macros: tuple[tuple[str, str], ...], device: torch.device, features: str = ""
) -> Any:
    """A program of `kernels.PROGRAMS`, compiled or from the cache: cuda.core's object code, whose
    `get_kernel` takes a name. `features` "a": with instructions that only this generation of GPUs
    has. Raises `RotationZooError` if cuda.core or NVRTC is missing, and `TypeError` where a kernel
    takes what the table does not say."""
    kernels.check(source)
    # Imported here because the package is optional.
    try:
        from cuda.core import Device, Program, ProgramOptions
        from cuda.core.utils import FileStreamProgramCache
    except ImportError as error:
        hint = f"install it with: {INSTALL}"
        raise RotationZooError("the CUDA kernels need NVIDIA's cuda.core", hint) from error
    with torch.cuda.device(device):
        gpu = Device(torch.cuda.current_device())
        gpu.set_current()
        options = ProgramOptions(
            arch=f"sm_{gpu.arch}{features}", std="c++17", define_macro=[*macros]
        )
        with FileStreamProgramCache() as programs:
            return Program(kernels.read(source), "c++", options).compile("cubin", cache=programs)


def run_beside(kernel: Any, device: torch.device) -> None:
    """Let other kernels start on a multiprocessor while this one runs. They would wait for a larger
    share of shared memory otherwise."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    driver.cuKernelSetAttribute(attribute, 100, driver.CUkernel(int(kernel.handle)), device.index)


@cache
def shared_memory(device: torch.device) -> int:
    """The most bytes of shared memory of a block; on a CPU, those of the largest GPU."""
    if device.type == "cpu":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types do not list them all
    return int(properties.shared_memory_per_block_optin)


def allow_shared(kernel: Any, size: int, device: torch.device) -> None:
    """Let blocks of this kernel be launched with so many bytes of shared memory, beyond 48 KiB.
    Raises `RotationZooError` on a GPU that has less."""
    from cuda.bindings import driver

    if size > (most := shared_memory(device)):
        problem = f"a kernel takes {size:,} bytes of shared memory, and this GPU has {most:,}"
        raise RotationZooError(problem, hint="ask for fewer bits, which take less of it: --bits 2")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.cuKernelSetAttribute(attribute, size, driver.CUkernel(int(kernel.handle)), device.index)


class Launcher:
    """Launches kernels on torch's current stream of one GPU."""

    def __init__(self, device: torch.device):
        self.index = torch.cuda.current_device() if device.index is None else device.index

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        arguments: tuple[Any, ...],
        early: bool = True,
        shared: int = 0,
    ) -> None:
        """Launch a kernel with its tuple of arguments in `kernels.PROGRAMS`.

        With `early`, it may start before the kernel before it in the stream has ended. The contract
        of all sources: until it executes `griddepcontrol.wait`, such a kernel writes nothing, and
        reads only data of an artifact. Afterwards, all kernels before it have ended. Those of
        attention.cu may read more, and say there why.
        """
        from cuda.core import launch

        values = _values(arguments)
        stream = _stream(torch.cuda.current_stream(self.index).cuda_stream)
        config = _launch_config(grid, threads, early and _waits_itself(self.index), shared)
        if torch.cuda.current_device() == self.index:
            launch(stream, config, kernel, *values)
            return
        with torch.cuda.device(self.index):
            launch(stream, config, kernel, *values)


@cache
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


@cache
def _waits_itself(index: int) -> bool:
    """Whether a kernel on this GPU can wait for the one before it. Older versions of cuda.core have
    no option for it, and older GPUs no instruction."""
    from cuda.core import LaunchConfig

    return torch.cuda.get_device_capability(index) >= _WAITING_GPU and hasattr(LaunchConfig, _EARLY)


@lru_cache(maxsize=1024)
def _launch_config(grid: tuple[int, int, int], threads: int, early: bool, shared: int) -> Any:
    from cuda.core import LaunchConfig

    options: dict[str, Any] = {"grid": grid, "block": threads}
    if early:
        options[_EARLY] = True
    if shared:
        options["shmem_size"] = shared
    return LaunchConfig(**options)


def _values(arguments: tuple[Any, ...]) -> list[int | float]:
    """The numbers that a kernel receives: addresses, 64-bit integers and doubles."""
    values: list[int | float] = []
    for argument in arguments:
        kind = type(argument)
        if kind is int or kind is float:
            values.append(argument)
        elif argument is None:  # a null pointer
            values.append(0)
        elif isinstance(argument, tuple):
            values += _values(argument)
        else:
            values.append(argument.data_ptr())
    return values


@dataclass(frozen=True)
class Packed:
    """Stored rows: `codes` are bytes `[H, N, D / 4]` of `int2.pack`, and `metadata`
    `[H, N, D / group, 2]` holds scale and offset in the format's type."""

    codes: torch.Tensor
    metadata: torch.Tensor
    format: Format = SGLANG


@dataclass(frozen=True)
class Variant:
    """The shape and type of rows, the format, and the optional steps of a compiled kernel."""

    dim: int
    group: int
    dtype: torch.dtype
    format: Format = SGLANG
    clips: bool = False
    """Whether any ratio is below 1."""
    rotates: bool = False
    """Whether rows are multiplied by a matrix."""

    def macros(self) -> list[tuple[str, str]]:
        """Its macros. Raises `RotationZooError` for unsupported shapes and types."""
        dim, group, format = self.dim, self.group, self.format
        check_shape(dim, group, format)
        largest = 4 * self.run * _WARP
        if dim % 16 or dim > largest or group % 4 or self.dtype not in TYPES:
            dtype = str(self.dtype).removeprefix("torch.")
            raise RotationZooError(
                f"the CUDA kernel takes no rows of {dim} {dtype} in groups of {group}, but "
                f"multiples of 16 up to {largest} in float32, float16 or bfloat16, "
                "and groups of multiples of 4"
            )
        values = {
            "D": dim,
            "GROUP": group,
            "TYPE": TYPES[self.dtype],
            "CLIP": self.clips,
            "ROTATE": self.rotates,
            "INTERPOLATED": format.interpolated,
            "HALF": format.metadata == "float16",
            "MINIMUM": format.offset == "minimum",
            "STRIDED": format.packing == "strided",
        }
        return [(name, str(int(value))) for name, value in values.items()]

    @property
    def run(self) -> int:
        """Neighboring channels of each quarter of a row that a thread holds: `RUN` in `int2.cu`."""
        wide = self.dtype != torch.float32 and self.dim % 32 == 0 and self.group % 8 == 0
        return 8 if wide and not self.rotates else 4

    @property
    def block_rows(self) -> int:
        """Rows of a thread block, as in the source. In `int2.cu`, `lanes` threads share a row."""
        lanes = max(2, 1 << (self.dim // 4 // self.run - 1).bit_length())
        rows_of_a_lane = 4 if self.rotates else 1
        return THREADS // lanes * rows_of_a_lane


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel on one GPU. A call launches it without waiting for the result."""

    function: Any
    block_rows: int

    def __call__(self, rows: torch.Tensor, arguments: tuple[Any, ...]) -> None:
        """Launch for rows `[H, N, ...]`, or their codes."""
        if not rows.numel():  # CUDA refuses an empty grid
            return
        grid = -(-rows.shape[1] // self.block_rows), rows.shape[0], 1
        Launcher(rows.device)(self.function, grid, THREADS, arguments, early=False)


@cache
def compiled(name: str, variant: Variant, device: torch.device) -> Kernel:
    """The variant's kernel. Raises `RotationZooError` as `build` and `Variant.macros` do."""
    function = build("int2.cu", tuple(variant.macros()), device).get_kernel(name)
    return Kernel(function, variant.block_rows)
