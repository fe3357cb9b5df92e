"""The machine that a calibration runs on: its memory, the peak memory used, and its device's
name."""

import os
import platform
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from rotationzoo import ranks
from rotationzoo.model import placement

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_STATUS = Path("/proc/self/status")


def total_memory(on_cpu: bool, spread: bool) -> int:
    """Bytes of memory available where a job runs.

    That is main memory, the memory of the GPU, or all of both if the weights are `spread` over
    devices. In a container, the container's own limit caps main memory.
    """
    main = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such limit, or the word "max"
        main = min(main, int(_CONTAINER_LIMIT.read_text()))
    if not torch.cuda.is_available() or (on_cpu and not spread):
        return main
    devices = range(torch.cuda.device_count())
    sizes = [torch.cuda.get_device_properties(device).total_memory for device in devices]
    return main + sum(sizes) if spread else sizes[torch.cuda.current_device()]


def free_memory(device: "torch.device") -> int:
    """Bytes that can still be allocated on a device; for a CPU, in main memory, within the limit of
    a container, and divided among the processes of a launcher."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch keeps what it has freed for itself.
        reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return free + reserved - used
    return placement.free_memory("cpu") // ranks.local_world()


def peak_memory() -> int:
    """The peak memory of this process in bytes: allocated on all CUDA devices if it used them, else
    resident in main memory."""
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        on_devices = sum(torch.cuda.max_memory_allocated(device) for device in devices)
        if on_devices:
            return on_devices
    with suppress(OSError):  # only Linux has it
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Where the process that started this one was larger, this is the peak of that one.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # `ru_maxrss` is in bytes on macOS and in kilobytes on Linux.
    return resident if sys.platform == "darwin" else resident * 1024


def device_name(device: str) -> str:
    """The name that a manifest gives to the device `cuda` or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
