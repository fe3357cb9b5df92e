"""Learns one side of several layers at once.

A step in one layer is a handful of small products, which leave a GPU waiting for the next. Heads
learn by themselves, so those of all layers with the same shapes are one batch.
"""

from collections.abc import Sequence

import torch

from rotationzoo.calibration.search.layer import LayerSearch, Ranking
from rotationzoo.calibration.search.learn import LearningSettings, StoredRows, learn_rotations

Learned = tuple[torch.Tensor, torch.Tensor]
"""Rotations `[S, H, D, D]`, and their losses by step, `[steps, S, H]`."""


def learn_side(
    side: str,
    searches: Sequence[LayerSearch],
    rankings: Sequence[Ranking],
    settings: LearningSettings,
) -> list[Learned | None]:
    """Learn rotations from the starts of each layer; None for a layer without rows to learn
    from."""
    learned: list[Learned | None] = [None] * len(searches)
    by_shape: dict[tuple[torch.device, torch.Size], list[tuple[int, StoredRows]]] = {}
    for number, search in enumerate(searches):
        rows = search.rows(side)
        if rows is not None:
            shape = rows.rows.shape[:1] + rows.rows.shape[2:]
            by_shape.setdefault((search.data.device, shape), []).append((number, rows))
    for alike in by_shape.values():
        numbers = [number for number, _ in alike]
        starts = [_stack_starts(rankings[number]) for number in numbers]
        metrics = [rankings[number].metric.to(starts[0].device) for number in numbers]
        start = torch.cat(starts, dim=1)
        # All layers have the clip ratios of the recipe.
        codec = searches[numbers[0]].codec.learnable(side, start)
        parts = [rows for _, rows in alike]
        matrix, losses = learn_rotations(parts, torch.cat(metrics), start, codec, settings)
        heads = [of_layer.shape[1] for of_layer in starts]
        by_layer = zip(matrix.split(heads, dim=1), losses.split(heads, dim=2), strict=True)
        for number, result in zip(numbers, by_layer, strict=True):
            learned[number] = result
    return learned


def _stack_starts(ranking: Ranking) -> torch.Tensor:
    """The starts `[S, H, D, D]` of one layer."""
    return torch.stack([start.matrix for start in ranking.starts])
