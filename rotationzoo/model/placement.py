"""Placing weights that do not fit one device: accelerate's device map and memory limits."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rotationzoo.errors import UsageError
from rotationzoo.model.files import weight_files
from rotationzoo.model.source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Placement:
    """accelerate's device map, with memory limits per device and a scratch folder for weights
    offloaded to disk."""

    device_map: str
    max_memory: dict[int | str, str] | None
    offload_folder: str


@contextmanager
def place_weights(device_map: str | None, max_memory: str | None) -> Iterator[Placement | None]:
    """Yield where the weights go, or None for a single device. The scratch folder is deleted
    afterwards."""
    if device_map is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rotationzoo-offload-") as folder:
        yield Placement(device_map, memory_limits(device_map, max_memory), folder)


def memory_limits(device_map: str | None, max_memory: str | None) -> dict[int | str, str] | None:
    """Parse `0=20GiB,cpu=60GiB` into the form that accelerate takes. Raises `UsageError`."""
    if max_memory is None:
        return None
    if device_map is None:
        raise UsageError("--max-memory needs a device map", hint="add: --device-map auto")
    limits: dict[int | str, str] = {}
    # `filter` forgives a trailing comma.
    for part in filter(None, max_memory.split(",")):
        device, _, amount = part.partition("=")
        if not device or not amount:
            raise UsageError(
                f"--max-memory has no amount in {part!r}",
                hint="write it as: --max-memory 0=20GiB,cpu=60GiB",
            )
        limits[int(device) if device.isdigit() else device] = amount
    return limits


def weights_bytes(source: Source, model: "PreTrainedModel") -> int:
    """Size of the weight files if they are local, and otherwise of the parameters on `meta` in the
    config's dtype."""
    if paths := weight_files(source.folder):
        return sum(path.stat().st_size for path in paths)
    dtype = getattr(model.config.get_text_config(decoder=True), "dtype", None) or torch.bfloat16
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
