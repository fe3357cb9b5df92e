"""Chooses the clip ratios of a whole model by what its answers and predictions lose.

The scores of a single layer cannot see that clipping shrinks every row. Errors that differ from
layer to layer average out, but shrinking accumulates, so ratios chosen head by head come out too
low. All heads of a side therefore share one ratio, which is also all that most engines support.
"""

import math
import time
from collections.abc import Callable

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.search.candidate import Candidate
from rotationzoo.calibration.search.criterion import Criterion, Score, find_best
from rotationzoo.codec import int2
from rotationzoo.rotations import SIDES, Rotations

_STEP = 0.02  # between clip ratios; repeated until another entry is the threshold

Clips = dict[str, dict[float, Score]]
"""Side -> clip ratio -> the score with this ratio."""


def search_clip(
    criterion: Criterion,
    candidate: Candidate,
    deadline: float = math.inf,
    tell: Callable[[], None] = lambda: None,
) -> tuple[Candidate, Clips]:
    """Choose one clip ratio for keys and one for values; also return all ratios that were tried.

    Each side descends from its present ratio until neither neighbour is better. No more ratios are
    tried after `deadline` (`time.monotonic()`). `tell` is called when a side is done.
    """
    tried: Clips = {}
    # Keys go first, so that the ratio of values is judged with the keys that will be served.
    for side in SIDES:
        tried[side] = _descend(criterion, candidate, side, deadline)
        candidate = candidate.with_clip(side, _best_ratio(tried[side]))
        tell()
    return candidate, tried


def _descend(
    criterion: Criterion, candidate: Candidate, side: str, deadline: float
) -> dict[float, Score]:
    """Descend from the present clip ratio until neither neighbour is better; return the score of
    each ratio that was tried."""
    cache, group_size = criterion.divergence.cache, criterion.divergence.group_size
    channels = _threshold_channels(candidate.rotations, side, cache, group_size)
    tried: dict[float, Score] = {}
    untried = [candidate.clips[side]]
    while untried:
        by_name = {}
        for ratio in untried:
            changed = candidate.with_clip(side, ratio)
            by_name[changed.name] = changed.rotations
        tried |= zip(untried, criterion.measure(by_name).values(), strict=True)
        if time.monotonic() >= deadline:
            break
        # Two ratios that clamp at the same entry give the same cache, so only one is measured.
        clamped = {_clamp_positions(ratio, channels, cache) for ratio in tried}
        untried = [
            ratio
            for ratio in _neighbours(_best_ratio(tried), channels, cache)
            if _clamp_positions(ratio, channels, cache) not in clamped
        ]
    return tried


def _best_ratio(tried: dict[float, Score]) -> float:
    return list(tried)[find_best(list(tried.values()))]


def _neighbours(ratio: float, channels: set[int], cache: Cache) -> list[float]:
    """The nearest ratios below and above that clamp at another entry.

    Of 16 sorted magnitudes, for example, .90 and .92 clamp at the same one.
    """
    neighbours = []
    here = _clamp_positions(ratio, channels, cache)
    for step in (-_STEP, _STEP):
        candidate = round(ratio + step, 4)
        while 0 < candidate <= 1 and _clamp_positions(candidate, channels, cache) == here:
            candidate = round(candidate + step, 4)
        if 0 < candidate <= 1:
            neighbours.append(candidate)
    return neighbours


def _clamp_positions(ratio: float, channels: set[int], cache: Cache) -> tuple[float, ...]:
    """The position of the clip threshold among a row's sorted magnitudes, for each number of
    channels."""
    positions = []
    for count in sorted(channels):
        entry, weight = int2.clip_position(ratio, count, cache.format.interpolated)
        positions.append(entry.item() + weight.item())
    return tuple(positions)


def _threshold_channels(
    rotations: Rotations, side: str, cache: Cache, group_size: int | None
) -> set[int]:
    """The numbers of channels that share one clip threshold, over all layers."""
    dims = {sides[side].dim for sides in rotations.values()}
    if cache.format.clip_scope == "group":
        return {group_size or dim for dim in dims}
    return dims
