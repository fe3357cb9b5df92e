"""Closed-form rotations to choose from, from the statistics that are kept anyway."""

import torch

from rotationzoo import rotation
from rotationzoo.moments import Moment

HADAMARD = "hadamard"


def bases(moments: dict[str, Moment], side: str) -> dict[str, torch.Tensor]:
    """Name -> symmetric matrices `[H, D, D]`, float64, whose eigenbasis a candidate takes.

    `query` and `output` are what attention reads (C_Q, C_S); `key` and `value` what is stored; their covariances are about
    the mean, which is what is left of centred rows.
    """
    read, stored = ("query", "key") if side == "key" else ("output", "value")
    second, mean = moments[stored].second_moment.cpu(), moments[stored].mean.cpu()
    return {
        read: moments[read].second_moment.cpu(),
        stored: second,
        f"{stored} covariance": second - mean.unsqueeze(-1) * mean.unsqueeze(-2),
    }


def candidates(moments: dict[str, Moment], side: str, composition: str, group_size: int | None) -> dict[str, torch.Tensor]:
    """Name -> rotations `[H, D, D]`, float64: each basis in the recipe's composition, and the Hadamard matrix alone."""
    found = {
        name: rotation.compose(rotation.eigenbasis(matrix)[1], composition, group_size or matrix.shape[-1])
        for name, matrix in bases(moments, side).items()
    }
    heads, dim = next(iter(found.values())).shape[:2]
    return found | {HADAMARD: rotation.data_free(dim, HADAMARD, seed=0).expand(heads, -1, -1)}
