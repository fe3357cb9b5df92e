"""Where the samples of a search lie: on the device of their layer, or in host memory."""

import torch

from rotationzoo.model.placement import free_memory

DEVICE_SHARE, HOST_SHARE = 0.9, 0.5
"""The shares of the memory that is free which samples may take: on a device, beside a reserve for
what is computed on them; and in host memory, where other programs run."""
_PINNED = 2  # torch rounds pinned allocations up to powers of two

_HOST = torch.device("cpu")


class Buffer:
    """Memory for the samples of one layer, which is taken piece by piece."""

    def __init__(self, flat: torch.Tensor):
        self._flat, self._used = flat, 0

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The next piece, of some shape; its content is undefined."""
        start = self._used
        self._used += torch.Size(shape).numel()
        return self._flat[start : self._used].view(shape)


class Shelf:
    """Gives memory to layers for as long as some is free.

    `reserve` is the number of bytes that a device keeps free for what is computed on the samples.
    """

    def __init__(self, reserve: int):
        self._reserve = reserve
        self._room: dict[torch.device, int] = {}

    def allocate(
        self, elements: int, dtype: torch.dtype, device: torch.device, must: bool = False
    ) -> Buffer | None:
        """Memory for the samples of a layer on `device`: there, or else in host memory; None where
        neither has room for them, unless there `must` be."""
        size = elements * dtype.itemsize
        if self._take(size, device):
            return Buffer(torch.empty(elements, dtype=dtype, device=device))
        if device != _HOST and self._take(_PINNED * size, _HOST):
            return Buffer(torch.empty(elements, dtype=dtype, pin_memory=device.type == "cuda"))
        if must or (device != _HOST and self._take(size, _HOST)):
            return Buffer(torch.empty(elements, dtype=dtype))
        return None

    def _take(self, size: int, device: torch.device) -> bool:
        """Whether so many bytes are left; if so, they are counted as taken."""
        if device not in self._room:
            reserve = 0 if device == _HOST else self._reserve
            share = HOST_SHARE if device == _HOST else DEVICE_SHARE
            self._room[device] = int(share * (free_memory(device) - reserve))
        if size > self._room[device]:
            return False
        self._room[device] -= size
        return True
