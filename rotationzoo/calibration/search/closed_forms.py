"""Closed-form rotations to choose from, from the statistics that are kept anyway.

Full mixing gives every channel the same range, and every channel the same error. Where queries read
some directions much more than others, less is lost by mixing only directions that are read alike,
and by letting the clip take the rest: so each basis comes with Hadamard blocks of several widths,
over directions sorted by how much is stored for how much is read.
"""

import torch

from rotationzoo.linalg import compositions
from rotationzoo.linalg.hadamard import hadamard

_WIDTHS = (1, 4, 8, 16, 32, 64)
_SMALLEST = 1e-6  # eigenvalues, relative to the largest, below which a logarithm says nothing


def bases(stored: torch.Tensor, read: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name -> orthogonal matrices `[H, D, D]`, float64, whose columns are sorted.

    `stored` is the second moment (or covariance) of what is stored, `read` the metric in which its
    errors count: of keys the second moment of their queries, of values that of the output
    projection. `joint` diagonalises the difference of their logarithms: what is stored much and
    read little comes last, and undoing such a scale is what no rotation can do.
    """
    ratio = stored.diagonal(dim1=-2, dim2=-1) / read.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300)
    channels = compositions.identity(stored.shape[-1])[:, ratio.argsort(-1)].transpose(0, 1)
    return {
        "read": compositions.eigenbasis(read)[1],
        "stored": compositions.eigenbasis(stored)[1],
        "joint": compositions.eigenbasis(_log(stored) - _log(read))[1],
        "channels": channels,
    }


def closed_forms(stored: torch.Tensor, read: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name -> rotations `[H, D, D]`, float64: each basis times block Hadamard matrices, and the
    Hadamard matrix alone."""
    heads, dim = stored.shape[:2]
    found = {"hadamard": hadamard(dim).expand(heads, -1, -1)}
    for name, basis in bases(stored, read).items():
        for width in _widths(dim):
            found[f"{name} h{width}"] = basis @ compositions.block_hadamard(dim, width)
    return found


def count(dim: int) -> int:
    """How many candidates there are for heads of so many channels."""
    return 1 + 4 * len(_widths(dim))


def _widths(dim: int) -> list[int]:
    """Of the Hadamard blocks."""
    return [*(width for width in _WIDTHS if width < dim and dim % width == 0), dim]


def _log(moment: torch.Tensor) -> torch.Tensor:
    eigenvalues, vectors = compositions.eigenbasis(moment)
    floor = eigenvalues.amax(-1, keepdim=True) * _SMALLEST
    return vectors @ torch.diag_embed(eigenvalues.clamp(min=floor).log()) @ vectors.mT
