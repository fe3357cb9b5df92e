"""The sums of a calibration while it runs: of whole batches, which a checkpoint keeps, and of the
batch under way, which are undone if it runs out of memory midway.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from functools import partial

import torch

from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.observers import zero_statistics
from rotationzoo.errors import Unsound
from rotationzoo.geometry import Geometry
from rotationzoo.linalg.moments import Moment, Statistics
from rotationzoo.model.out_of_memory import Undo
from rotationzoo.recipe import Recipe


def keep_sums(statistics: Statistics) -> Undo:
    """Copy the sums where they are, and return what puts the copies in their place, once. The
    copies take as much memory as the sums; `calibration.memory` counts them."""
    # Observers hold the outer table, so it stays the same one.
    return partial(statistics.update, deepcopy(statistics))


class RunningSums:
    """The sums of `done` whole batches in `whole`, and of the batch under way in `batch`.

    A batch that is given up, by an error or Ctrl-C in the middle of the model, leaves no trace in
    `whole`, so that what was done before it can be saved.
    """

    def __init__(
        self,
        geometry: Geometry,
        recipe: Recipe,
        checkpoint: Checkpoint | None,
        device: torch.device,
    ):
        # Made where most layers are: to move zeros from the CPU can take longer than a batch.
        self.batch = zero_statistics(geometry, recipe, device)
        self.whole, self.done = zero_statistics(geometry, recipe, device), 0
        self._checkpoint = checkpoint
        saved = None if checkpoint is None else checkpoint.read(self.whole)
        if saved is not None:
            self.whole, self.done = saved
        self._saved = self.done
        self._torn = self._begun = False

    def keep_batch(self) -> Undo:
        """Return a function that takes back what the next forward pass adds to `batch`. Called
        before each pass that may run out of memory."""
        if self._begun:
            return keep_sums(self.batch)
        self._begun = True
        return self._clear_batch

    def _clear_batch(self) -> None:
        """Set the sums of the batch back to zero, which needs no copy."""
        moments = itertools.chain.from_iterable(kinds.values() for kinds in self.batch.values())
        torch._foreach_zero_([tensor for moment in moments for tensor in _sums(moment)])
        self._begun = False

    def finish_batch(self, kinds: tuple[str, ...]) -> None:
        """Add the sums of the batch under way, of these kinds, to the others, and save them if the
        last save is long ago. Raises `Unsound` if a sum is not finite, and removes the checkpoint,
        whose sums would make a run with other options refuse to start."""
        try:
            check_finite(self.batch, kinds)
        except Unsound:
            if self._checkpoint is not None:
                self._checkpoint.remove()
            raise
        self._torn = True
        totals, parts = [], []
        for layer, moments in self.batch.items():
            for kind in filter(moments.__contains__, kinds):
                total = self.whole[layer][kind].to(moments[kind].second.device)
                self.whole[layer][kind] = total
                totals += _sums(total)
                parts += _sums(moments[kind])
        torch._foreach_add_(totals, parts)
        torch._foreach_zero_(parts)
        self.done += 1
        self._torn = self._begun = False
        if self._checkpoint is not None and self._checkpoint.save(self.whole, self.done):
            self._saved = self.done

    @contextmanager
    def saved_if_interrupted(self) -> Iterator[None]:
        """Save the whole batches, if there are any that were not saved, where Ctrl-C or a
        scheduler's SIGTERM ends the block."""
        try:
            yield
        except KeyboardInterrupt:
            if self._checkpoint is not None and self.done > self._saved and not self._torn:
                self._checkpoint.save(self.whole, self.done, at_once=True)
            raise


def check_finite(statistics: Statistics, kinds: tuple[str, ...]) -> None:
    """Raise `Unsound`, naming the first layer, if a sum is not finite. The sums of a device are
    read at once: every kernel takes its time, and a transfer waits for all of them."""
    by_device = defaultdict(list)
    for layer, kind in itertools.product(statistics, kinds):
        if kind in statistics[layer]:
            by_device[statistics[layer][kind].second.device].append((layer, kind))
    for of_device in by_device.values():
        moments = [statistics[layer][kind] for layer, kind in of_device]
        first = torch.stack(torch._foreach_norm([moment.first for moment in moments]))
        second = torch.stack(torch._foreach_norm([moment.second for moment in moments]))
        finite = (first + second).isfinite().tolist()
        for (layer, kind), is_finite in zip(of_device, finite, strict=True):
            if not is_finite:
                raise Unsound(
                    f"layer {layer} has {kind.replace('_', ' ')} activations that are not finite",
                    hint="run again with --dtype float32; if that does not help, "
                    "the weights are damaged",
                )


def _sums(moment: Moment) -> list[torch.Tensor]:
    return [getattr(moment, field.name) for field in fields(Moment)]
