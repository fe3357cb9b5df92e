"""The mark that RoPE leaves in second moments of queries and keys: both channels of a RoPE pair
have nearly the same energy.

Values carry no such mark. The mark therefore tells keys from values, and a matrix from its
transpose, even in a file that names no model.
"""

import torch

_FEWEST = 256  # pairs of channels over all matrices: with fewer, chance could look like a mark
_TINY = 1e-300  # avoids 0 / 0 for two channels without energy


def pair_contrast(second_moment: torch.Tensor) -> float | None:
    """How much energies differ within RoPE pairs of second moments `[N, D, D]`, divided by how much
    they differ between unrelated channels.

    It is about 1 without the mark. On six published pairs of files it was .01 to .54 for keys, .86
    and more for values and for transposed keys, and .68 and more for keys with a Hadamard matrix
    undone as another composition.

    The result is the smallest contrast over the known layouts: RoPE pairs the two halves of all, of
    half, or of a quarter of the channels, or it pairs neighbours. None if there are too few pairs
    to tell.
    """
    energy = second_moment.diagonal(dim1=-2, dim2=-1).double()
    dim = energy.shape[-1]
    halves = [rotated // 2 for rotated in (dim, dim // 2, dim // 4)]
    layouts = [(energy[..., :half], energy[..., half : 2 * half]) for half in halves]
    layouts.append((energy[..., 0::2], energy[..., 1::2]))
    contrasts = [_contrast(first, second) for first, second in layouts]
    known = [contrast for contrast in contrasts if contrast is not None]
    return min(known) if known else None


def _contrast(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """The contrast of channels `[N, pairs]` and their partners, or None if they are too few.

    Rolling the partners gives each channel an unrelated one to compare with.
    """
    if first.numel() < _FEWEST:
        return None
    unrelated = second.roll(max(1, first.shape[-1] // 4), -1)
    return (_difference(first, second) / _difference(first, unrelated)).item()


def _difference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The median relative difference of two energies."""
    total = (first + second).abs().clamp(min=_TINY)
    return ((first - second).abs() / total).median()
