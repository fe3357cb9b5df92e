"""A device whose memory runs out: stood in for by an error in one layer of a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def room_for(model, rows: int, layer: int = 1) -> Iterator[list[int]]:
    """Inside the block, this layer of the model raises what a full GPU raises where a forward pass
    has more rows. Yields the rows of every pass that has got so far."""
    passes: list[int] = []

    def fail(module, args, kwargs) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        passes.append(len(hidden))
        if len(hidden) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    module = model.model.layers[layer].mlp  # after its attention, whose rows count already
    hook = module.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()
