"""Running where a device's memory is full: a batch is halved and run again, and where nothing
is left to halve, one sentence says so."""

import gc
import logging
from collections.abc import Callable

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.words import counted

log = logging.getLogger(__name__)
# On a full GPU, CUDA's libraries fail with errors of their own before torch's allocator does. torch
# has no type for a full main memory.
_SIGNS = ("CUBLAS_STATUS_ALLOC_FAILED", "cusolverDnCreate", "DefaultCPUAllocator: can't allocate")

Undo = Callable[[], None]
"""Takes back what a forward pass has added up before it failed."""


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


class RowLimit:
    """How many rows of a batch run in one forward pass: all (None), or the number that was left
    after memory ran out, for all batches that follow."""

    def __init__(self) -> None:
        self.rows: int | None = None

    def run(
        self, ids: torch.Tensor, forward: Callable[[torch.Tensor], None], keep: Callable[[], Undo]
    ) -> None:
        """Call `forward` with the rows `[B, T]`, in order and each once. Where it runs out of
        memory, what `keep` returned just before is called, and the same rows follow in halves.
        Raises `RotationZooError` where a single row is too large."""
        done = 0
        while done < len(ids):
            rows = ids[done : done + (self.rows or len(ids))]
            undo = None  # frees what was kept for the rows before
            if len(rows) > 1:
                undo = keep()
            try:
                forward(rows)
                done += len(rows)
                continue
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if undo is None:
                    raise does_not_fit(*rows.shape) from error
            # Not in the `except` block, where the traceback still holds what the pass allocated.
            undo()
            self.rows = len(rows) // 2
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            log.warning(
                "Memory ran out with %s of %d tokens in a forward pass; going on with %d",
                counted(len(rows), "row"),
                rows.shape[1],
                self.rows,
            )
