"""Programs compiled for an NVIDIA GPU, and their kernels launched on torch's stream.

NVIDIA's cuda.core compiles a source with NVRTC for the GPU that it finds, keeps the result in the
user's cache, and launches it. Unlike torch's extension builder, it needs no CUDA toolkit, host
compiler or build step. The extra `cuda` has it.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from rotationzoo.errors import RotationZooError

INSTALL = "pip install 'cuda-bindings>=13,<14' 'cuda-core>=1' 'nvidia-cuda-nvrtc>=13,<14'"
_EARLY = "programmatic_stream_serialization"
_WAITING_GPU = 9, 0  # the compute capability from which on `wait_for_previous` is an instruction

Argument = torch.Tensor | float | None
"""What a kernel can be given. None is a null pointer."""


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
            hint=f"install it with: {INSTALL}",
        ) from error
    with torch.cuda.device(device):
        gpu = Device(torch.cuda.current_device())
        gpu.set_current()
        options = ProgramOptions(arch=f"sm_{gpu.arch}", std="c++17", define_macro=[*macros])
        with FileStreamProgramCache() as programs:
            return Program(source, "c++", options).compile("cubin", cache=programs)


class Launcher:
    """Launches kernels on torch's current stream of one GPU."""

    def __init__(self, device: torch.device):
        from cuda.core import Stream

        self.device = device
        self.waits_itself = torch.cuda.get_device_capability(device) >= _WAITING_GPU
        with torch.cuda.device(device):
            self.stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Iterable[Argument],
        early: bool = True,
    ) -> None:
        """Launch a kernel with the arguments of the function in the source. It may start before the
        one before it has ended, where it is to start `early`."""
        from cuda.core import LaunchConfig, launch

        values = [_value(argument) for argument in arguments]
        # Older versions of cuda.core cannot say that a kernel waits for the one before by itself,
        # and older GPUs have no instruction for it.
        early = early and self.waits_itself and hasattr(LaunchConfig, _EARLY)
        option = {_EARLY: True} if early else {}
        config = LaunchConfig(grid=grid, block=threads, **option)
        with torch.cuda.device(self.device):
            launch(self.stream, config, kernel, *values)


def _value(argument: Argument) -> int | float:
    """What a kernel gets: an address, a 64-bit integer or a double."""
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
