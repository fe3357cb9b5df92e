"""The machine that a calibration runs on: how much memory it has, how much of it was used, and what
its device is called."""

import os
import platform
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def total_memory(on_cpu: bool, spread: bool) -> int:
    """Bytes of memory where a job runs: main memory, the GPU's, or all of both where weights are
    `spread` over devices. In a container its own limit counts."""
    main = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such limit, or the word "max"
        main = min(main, int(_CONTAINER_LIMIT.read_text()))
    if not torch.cuda.is_available() or (on_cpu and not spread):
        return main
    devices = range(torch.cuda.device_count())
    sizes = [torch.cuda.get_device_properties(device).total_memory for device in devices]
    return main + sum(sizes) if spread else sizes[torch.cuda.current_device()]


def peak_memory() -> int:
    """The most bytes that this process has used: of all CUDA devices where it used them, else
    resident in main memory."""
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        on_devices = sum(torch.cuda.max_memory_allocated(device) for device in devices)
        if on_devices:
            return on_devices
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Bytes on macOS, kilobytes on Linux.
    return resident if sys.platform == "darwin" else resident * 1024


def device_name(device: str) -> str:
    """What `cuda` or `cpu` is called in a manifest."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
