"""The sums of all processes, of which each has added up those of its share of the text."""

from collections.abc import Sequence
from dataclasses import fields

import torch

from rotationzoo import ranks
from rotationzoo.linalg.moments import Moment, Statistics
from rotationzoo.text.rows import Corpus

_TOGETHER = 16  # layers whose sums are sent at once: few waits for others, and small copies


def sum_over_ranks(statistics: Statistics, kinds: Sequence[str] | None = None) -> Statistics:
    """The sums over all processes, or those of some kinds alone. A process that is alone gets its
    statistics as they are.

    Every process calls this with the same layers and kinds. Float64 sums of other parts differ by
    rounding, so the result depends that much on how many processes there are.
    """
    if ranks.world() == 1:
        return statistics
    totals: Statistics = {}
    # Sorted, because sums that were read from a checkpoint come in another order.
    layers = sorted(statistics)
    for start in range(0, len(layers), _TOGETHER):
        group = layers[start : start + _TOGETHER]
        totals |= _sum_layers({layer: statistics[layer] for layer in group}, kinds)
    return totals


def _sum_layers(statistics: Statistics, kinds: Sequence[str] | None) -> Statistics:
    """The totals of some layers, sent as one tensor."""
    wanted = [(layer, kind) for layer in statistics for kind in sorted(kinds or statistics[layer])]
    tensors = []
    for layer, kind in wanted:
        moment = statistics[layer][kind]
        tensors += [getattr(moment, field.name) for field in fields(Moment)]
    # A process without text still has its zeros where they were made.
    device = tensors[0].device
    total = ranks.all_reduce(torch.cat([tensor.to(device).flatten() for tensor in tensors]))
    pieces = total.split([tensor.numel() for tensor in tensors])
    sums = [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    totals: Statistics = {layer: {} for layer in statistics}
    for number, (layer, kind) in enumerate(wanted):
        first = number * len(fields(Moment))
        totals[layer][kind] = Moment(*sums[first : first + len(fields(Moment))])
    return totals


def notes_of_idle(text: Corpus, batch: int) -> list[str]:
    """A note if some processes get none of the text's batches of so many rows, with what would give
    each of them one."""
    processes, batches = ranks.world(), len(text.batches(batch))
    if batches >= processes:
        return []
    smaller = (size for size in range(batch - 1, 0, -1) if len(text.batches(size)) >= processes)
    size = next(smaller, None)
    advice = "more --tokens" if size is None else f"--batch {size}"
    idle = processes - batches
    return [
        f"{idle} of {processes} processes had nothing to do: {advice} would give each of them a "
        "batch"
    ]
