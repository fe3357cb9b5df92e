"""Running where a device's memory is full, which one sentence says."""

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.words import counted

# On a full GPU, CUDA's libraries fail with errors of their own before torch's allocator does. torch
# has no type for a full main memory.
_SIGNS = ("CUBLAS_STATUS_ALLOC_FAILED", "cusolverDnCreate", "DefaultCPUAllocator: can't allocate")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that a device's memory is full."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


def does_not_fit(batch: int, length: int) -> RotationZooError:
    """The error of a batch of `batch` rows of `length` tokens for which there is no memory."""
    smaller = f"--batch {batch // 2}" if batch > 1 else "--device-map auto, or a shorter --length"
    return RotationZooError(
        f"a batch of {counted(batch, 'row')} of {length} tokens does not fit the device's memory",
        hint=f"add: {smaller}",
    )
