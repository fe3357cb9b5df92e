"""Sums as they were before a batch, for a batch that runs out of memory midway."""

from dataclasses import fields

from rotationzoo.linalg.moments import Moment, Statistics
from rotationzoo.model.out_of_memory import Undo


def keep_sums(statistics: Statistics) -> Undo:
    """Copy the sums where they are, and return what puts the copies in their place, once.

    The copies take as much memory as the sums; `calibration.memory` counts them.
    """
    kept: Statistics = {}
    for layer, moments in statistics.items():
        kept[layer] = {kind: _copy(moment) for kind, moment in moments.items()}

    def undo() -> None:
        # Observers hold the outer table, so it stays the same one.
        statistics.update(kept)

    return undo


def _copy(moment: Moment) -> Moment:
    return Moment(*(getattr(moment, field.name).clone() for field in fields(Moment)))
