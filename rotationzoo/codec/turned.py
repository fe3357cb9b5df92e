"""Turned means: what keys share before RoPE, at each position."""

import torch

from rotationzoo.rotations import Rotation


def angles(frequencies: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[T, D]`, float64, of frequencies `[D]` in radians a position, at the
    positions from `start` on."""
    positions = torch.arange(start, stop, dtype=torch.float64, device=frequencies.device)
    phase = positions[:, None] * frequencies
    return phase.cos(), phase.sin()


def turned_rows(rotation: Rotation, start: int, stop: int) -> torch.Tensor | None:
    """The turned mean `[KV heads, T, D]` of a rotation at the positions from `start` on; None
    without one."""
    if rotation.turned_mean is None:
        return None
    assert rotation.frequencies is not None
    phases = torch.stack(angles(rotation.frequencies, start, stop)).to(rotation.turned_mean)
    cosine, sine, constant = rotation.turned_mean[:, :, None].unbind(1)
    return cosine * phases[0] + sine * phases[1] + constant
