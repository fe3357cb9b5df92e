"""Chooses the clip ratios of a whole model by what the model's predictions lose.

The scores of a single layer cannot see that clipping shrinks every row. Errors that differ from
layer to layer average out, but shrinking accumulates, so ratios chosen head by head come out too
low. All heads of a side therefore share one ratio, which is also all that most engines support. It
is judged by the divergence of the model's predictions.
"""

import math
import time
from typing import Any

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.search.choice import BASELINE
from rotationzoo.calibration.search.model_divergence import ModelDivergence
from rotationzoo.codec import int2
from rotationzoo.linalg.paired import clearly_less
from rotationzoo.progress import Progress, silent
from rotationzoo.rotations import SIDES, Rotations

_STEP = 0.02  # between clip ratios; repeated until another entry is the threshold


def search_clip(
    loss: ModelDivergence,
    baseline: Rotations,
    chosen: Rotations,
    deadline: float = math.inf,
    progress: Progress = silent,
) -> tuple[Rotations, dict[str, Any]]:
    """Choose which sides to keep, and one clip ratio per side; also return a record of both
    choices.

    A side of `chosen` is kept only where the model clearly gains; otherwise the recipe's `baseline`
    stays. The record holds the divergence of the model's predictions, in nats per token, with
    either or both sides chosen and with each ratio tried. No more ratios are tried after `deadline`
    (`time.monotonic()`).
    """
    progress("trimming", 0, 3)
    rotations, record = _choose_sides(loss, baseline, chosen)
    # Keys go first, so that the ratio of values is judged with the keys that will be served.
    for number, side in enumerate(SIDES):
        progress("trimming", 1 + number, 3)
        by_clip = _descend(loss, rotations, side, record["trimmed"], deadline)
        best = min(by_clip, key=lambda ratio: by_clip[ratio])
        rotations = rotations.with_clip(side, best)
        ascending = {f"{ratio:g}": by_clip[ratio] for ratio in sorted(by_clip)}
        record[side] = {"clip": best, "by_clip": ascending}
        record["trimmed"] = by_clip[best]
    progress("trimming", 3, 3)
    return rotations, record


def _choose_sides(
    loss: ModelDivergence, baseline: Rotations, chosen: Rotations
) -> tuple[Rotations, dict[str, Any]]:
    """The combination of baseline and chosen sides that loses least, if it loses clearly less than
    the baseline.

    The names of the combinations are those of the manifest's record.
    """
    combinations = {
        BASELINE: baseline,
        "keys": baseline.with_side("key", chosen),
        "values": baseline.with_side("value", chosen),
        "both": chosen,
    }
    by_text = loss.measure(list(combinations.values()))
    means = by_text.mean(1)
    best = int(means.argmin())
    kept = list(combinations)[best] if clearly_less(by_text[best], by_text[0]) else BASELINE
    by_side = dict(zip(combinations, means.tolist(), strict=True))
    record: dict[str, Any] = {"by_side": by_side, "kept": kept, "trimmed": by_side[kept]}
    return combinations[kept], record


def _descend(
    loss: ModelDivergence, rotations: Rotations, side: str, divergence: float, deadline: float
) -> dict[float, float]:
    """Descend from the present clip ratio, whose `divergence` is known, until neither neighbour is
    better.

    Returns the divergence of each ratio that was tried.
    """
    cache = loss.cache
    present = next(iter(rotations.values()))[side].clip[0].item()
    tried = {round(present, 4): divergence}
    channels = _threshold_channels(rotations, side, cache, loss.group_size)
    while time.monotonic() < deadline:
        # Two ratios that clamp at the same entry give the same cache, so only one is measured.
        clamped = {_clamp_positions(ratio, channels, cache) for ratio in tried}
        best = min(tried, key=lambda ratio: tried[ratio])
        neighbours = [
            ratio
            for ratio in _neighbours(best, channels, cache)
            if _clamp_positions(ratio, channels, cache) not in clamped
        ]
        if not neighbours:
            break
        means = loss.measure([rotations.with_clip(side, ratio) for ratio in neighbours]).mean(1)
        tried |= zip(neighbours, means.tolist(), strict=True)
    return tried


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
