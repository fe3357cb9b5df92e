"""Places weights that do not fit one device: device maps, memory limits and offloading to disk."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rotationzoo.errors import UsageError
from rotationzoo.model.files import weight_files
from rotationzoo.model.source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

USABLE = 0.9  # the usable part of free memory: allocators waste some, and estimates may be too low
Limits = dict[int | str, int]  # bytes of weights by device: the number of a GPU, or `cpu`
Placement = dict[str, Any]  # accelerate's options, with a scratch folder for offloaded weights
_MEMORY = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")
_MAPS = "auto", "balanced", "balanced_low_0", "sequential"  # accelerate's
PREFIX = "rotationzoo-offload-"
# CUDA libraries run out of memory before torch does. torch has no error type for main memory.
_FULL = ("CUBLAS_STATUS_ALLOC_FAILED", "cusolverDnCreate", "DefaultCPUAllocator: can't allocate")


@contextmanager
def place_weights(
    device_map: str | None, max_memory: str | None, reserved: int = 0
) -> Iterator[Placement | None]:
    """Yield the placement of the weights, or None for a single device. Raises `UsageError`."""
    if device_map is None:
        yield None
        return
    limits = memory_limits(device_map, max_memory)
    count = torch.cuda.device_count()
    missing = [each for each in limits or () if isinstance(each, int) and each >= count]
    if missing:
        problem = f"--max-memory names GPU {missing[0]}, and this machine has {count or 'none'}"
        raise UsageError(problem, "leave out GPUs that are not here: --max-memory cpu=60GiB")
    if limits is None and reserved:
        computing = devices_of(on_cpu=not torch.cuda.is_available())
        limits = {}
        for device in [*computing, *({"cpu"} - set(computing))]:
            usable = int(USABLE * free_memory(device))
            limits[device] = max(0, usable - reserved * (device in computing))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        yield {"device_map": device_map, "max_memory": limits, "offload_folder": folder}


def devices_of(on_cpu: bool) -> list[int | str]:
    """The devices that layers run on, in accelerate's names: the numbers of GPUs, or `cpu`."""
    return ["cpu"] if on_cpu else list(range(torch.cuda.device_count()))


def free_memory(device: torch.device | int | str) -> int:
    """Free bytes of a GPU (by number or name) or of main memory, within a container's limit."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch keeps freed memory reserved.
        reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return free + reserved - used
    # Caches of the system count as available. Without this number, assume half of the memory.
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    free = 1024 * sum_entries(_MEMORY, "MemAvailable:") or half
    return max(min([free, *(left for _, left in container_limits())]), 0)


def container_limits() -> Iterator[tuple[int, int]]:
    """The limit and the free bytes of each control group (cgroup v2) of this process."""
    with suppress(OSError):  # not on Linux
        for line in _GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = _CONTAINER / path[1:]
            for group in (own, *own.parents) if not controllers else ():
                with suppress(OSError, ValueError):  # no limit, or the word "max"
                    limit = int((group / "memory.max").read_text())
                    used = int((group / "memory.current").read_text())
                    # Cached files, such as weights, count as used.
                    cached = sum_entries(group / "memory.stat", "active_file", "inactive_file")
                    yield limit, limit - used + cached


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error means that a device is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _FULL)


def sum_entries(path: Path, *names: str) -> int:
    """The sum of the numbers after these names in a file of Linux; 0 without the file."""
    total = 0
    with suppress(OSError):
        for words in map(str.split, path.read_text().splitlines()):
            if words and words[0] in names:
                total += int(words[1])
    return total


def memory_limits(device_map: str | None, max_memory: str | None) -> Limits | None:
    """Parse `0=20GiB,cpu=60GiB` into bytes by device. Raises `UsageError`."""
    if device_map not in (None, *_MAPS):
        try:
            torch.device(device_map)
        except RuntimeError as error:
            unknown = f"there is no device map {device_map!r}"
            raise UsageError(unknown, hint="--device-map auto") from error
    if max_memory is None:
        return None
    if device_map is None:
        raise UsageError("--max-memory needs a device map", hint="add: --device-map auto")
    from accelerate.utils import convert_file_size_to_int

    limits: Limits = {}
    for part in filter(None, max_memory.split(",")):  # a trailing comma is fine
        device, _, amount = part.partition("=")
        size = None
        with suppress(ValueError):
            size = convert_file_size_to_int(amount)
        if not device or size is None:
            hint = "write it as: --max-memory 0=20GiB,cpu=60GiB"
            raise UsageError(f"--max-memory has no amount in {part!r}", hint)
        if not device.isdigit() and device not in ("cpu", "disk", "mps"):
            hint = "name GPUs by number: --max-memory 0=20GiB,cpu=60GiB"
            raise UsageError(f"--max-memory has an unknown device {device!r}", hint)
        name = int(device) if device.isdigit() else device
        if name in limits:
            raise UsageError(f"--max-memory names {device} twice", hint="give it one amount")
        limits[name] = size
    return limits


def weights_bytes(source: Source, model: "PreTrainedModel") -> int:
    """Size of the weight files, or else of the parameters on `meta` in the config's dtype."""
    if paths := weight_files(source.folder):
        return sum(path.stat().st_size for path in paths)
    dtype = getattr(model.config.get_text_config(decoder=True), "dtype", None) or torch.bfloat16
    return model.num_parameters() * int(dtype.itemsize)
