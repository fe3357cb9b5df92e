"""Candidate rotations in closed form, from the second moments that calibration collects anyway.

Mixing all channels gives every channel the same range and the same error. Where queries read some
directions much more than others, less is lost if only directions that are read about equally are
mixed, and clipping deals with the rest. Each basis is therefore combined with Hadamard blocks of
several widths, over directions sorted by how much is stored relative to how much is read.
"""

import torch

from rotationzoo.linalg import compositions
from rotationzoo.linalg.hadamard import hadamard

_WIDTHS = (1, 4, 8, 16, 32, 64)
_SMALLEST = 1e-6  # relative to the largest eigenvalue; the logarithm of smaller ones is noise


def closed_forms(stored: torch.Tensor, read: torch.Tensor) -> dict[str, torch.Tensor]:
    """Candidate name -> rotations `[H, D, D]`, float64.

    The candidates are each basis of `bases` times block Hadamard matrices, and the Hadamard matrix
    alone. The arguments are those of `bases`.
    """
    heads, dim = stored.shape[:2]
    candidates = {"hadamard": hadamard(dim).expand(heads, -1, -1)}
    for name, basis in bases(stored, read).items():
        for width in _widths(dim):
            candidates[f"{name} h{width}"] = basis @ compositions.block_hadamard(dim, width)
    return candidates


def count_closed_forms(dim: int) -> int:
    """How many candidates `closed_forms` makes for heads of `dim` channels."""
    return 1 + 4 * len(_widths(dim))


def bases(stored: torch.Tensor, read: torch.Tensor) -> dict[str, torch.Tensor]:
    """Basis name -> orthogonal matrices `[H, D, D]`, float64, with sorted columns.

    `stored` `[H, D, D]` is the second moment (or covariance) of what the cache stores. `read` is
    the metric in which its errors count: for keys the second moment of their queries, for values
    that of the output projection. `joint` diagonalises the difference of the two matrix logarithms,
    so its last directions are stored much and read little. No rotation can undo such a difference
    in scale.
    """
    stored_energy = stored.diagonal(dim1=-2, dim2=-1)
    # The clamp avoids a division by zero for channels that are never read.
    read_energy = read.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300)
    order = (stored_energy / read_energy).argsort(-1)
    return {
        "read": compositions.eigenbasis(read)[1],
        "stored": compositions.eigenbasis(stored)[1],
        "joint": compositions.eigenbasis(_logarithm(stored) - _logarithm(read))[1],
        "channels": compositions.identity(stored.shape[-1])[:, order].transpose(0, 1),
    }


def _widths(dim: int) -> list[int]:
    """Widths of the Hadamard blocks that divide `dim` channels, ending with the whole head."""
    return [*(width for width in _WIDTHS if width < dim and dim % width == 0), dim]


def _logarithm(moment: torch.Tensor) -> torch.Tensor:
    """The matrix logarithm of second moments `[H, D, D]`, after raising small eigenvalues to a
    floor."""
    eigenvalues, vectors = compositions.eigenbasis(moment)
    floor = eigenvalues.amax(-1, keepdim=True) * _SMALLEST
    return vectors @ torch.diag_embed(eigenvalues.clamp(min=floor).log()) @ vectors.mT
