"""The clip rule: the magnitude at which a row is clamped before it is quantized.

Ratios are keys of a recipe. Everything is float32 except the position of a threshold, which is
computed in float64.
"""

import torch

from rotationzoo.errors import RotationZooError


def clip_position(
    ratio: float | torch.Tensor, channels: int, interpolated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the clip threshold lies among the ascending sorted magnitudes of `channels` channels:
    the index of its entry, int64, and the float32 weight of the next entry. Raises
    `RotationZooError` for a ratio outside (0, 1].

    The index is `min(floor(c D + 1e-6), D - 1)`, computed in float64 (the 1e-6 makes .92 x 100
    count as 92). Where `interpolated`, the threshold is the quantile c as `torch.quantile` defines
    it. A ratio of 1 gives the largest magnitude, which clamps nothing.
    """
    ratio = torch.as_tensor(ratio, dtype=torch.float64)
    if not ((ratio > 0) & (ratio <= 1)).all():
        hint = "1 turns clipping off"
        raise RotationZooError("a clip ratio must be above 0 and at most 1", hint)
    if interpolated:
        position = ratio * (channels - 1)
    else:
        position = (ratio * channels + 1e-6).floor().clamp(max=channels - 1)
    return position.long(), (position - position.floor()).float()


def clip_threshold(
    rows: torch.Tensor, ratio: float | torch.Tensor, interpolated: bool = False
) -> torch.Tensor:
    """The magnitude `[...]` at which each row `[..., D]` is clamped: the entry of its sorted
    magnitudes that `clip_position` names. `ratio` broadcasts to `[...]`."""
    dim = rows.shape[-1]
    position, between = clip_position(ratio, dim, interpolated)
    magnitudes = rows.abs()
    positions = position.flatten()
    if rows.numel() and not interpolated and (positions == positions[0]).all():
        # One position for all rows, which is the rule: nothing to send to the device, and no order.
        return magnitudes.kthvalue(int(positions[0]) + 1).values
    entry, weight = _expand(position, rows), _expand(between, rows)
    if rows.numel():  # `entry.min()` would fail on no rows
        # Only the entries from the threshold up are needed: a few of D at the usual ratios.
        magnitudes = magnitudes.topk(dim - int(entry.min())).values
    # `topk` sorts in descending order, so positions count from the other end.
    threshold = _take(magnitudes, dim - 1 - entry)
    if interpolated:
        above = _take(magnitudes, (dim - 2 - entry).clamp(min=0))
        threshold = threshold + weight * (above - threshold)
    return threshold


def _expand(positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """One number for each row `[...]` of `[..., D]`, on their device."""
    return positions.to(rows.device).expand(rows.shape[:-1])


def _take(sorted_rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Pick one entry `[...]` of each row `[..., D]`."""
    return sorted_rows.gather(-1, index.unsqueeze(-1)).squeeze(-1)
