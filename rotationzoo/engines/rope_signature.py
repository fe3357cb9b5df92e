"""The mark that RoPE leaves in second moments of queries and keys: both channels of a rotated pair
have nearly the same energy.

Values carry none. That tells keys from values, and a matrix from its transpose, in a file that
names no model.
"""

import torch

_FEWEST = 256  # pairs of channels, over all matrices, below which chance could look like a mark


def pair_contrast(second_moment: torch.Tensor) -> float | None:
    """How much the energies of RoPE pairs differ, divided by how much those of other pairs do; `[N,
    D, D]`.

    About 1 without the mark; measured on six published pairs .01 to .54 for keys, .86 and more for
    values and for transposed keys, and .68 and more for keys read as of another composition with a
    Hadamard matrix. The least over the known layouts: halves of all, of half and of a quarter of
    the channels, and neighbours. None where there are too few pairs to tell.
    """
    energy = second_moment.diagonal(dim1=-2, dim2=-1).double()
    dim = energy.shape[-1]
    contrasts = []
    for rotated in (dim, dim // 2, dim // 4):
        contrasts.append(
            _contrast(energy[..., : rotated // 2], energy[..., rotated // 2 : rotated // 2 * 2])
        )
    contrasts.append(_contrast(energy[..., 0::2], energy[..., 1::2]))
    found = [contrast for contrast in contrasts if contrast is not None]
    return min(found) if found else None


def _contrast(one: torch.Tensor, other: torch.Tensor) -> float | None:
    if one.numel() < _FEWEST:
        return None
    return (
        _difference(one, other) / _difference(one, other.roll(max(1, one.shape[-1] // 4), -1))
    ).item()


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return ((one - other).abs() / (one + other).abs().clamp(min=1e-300)).median()
