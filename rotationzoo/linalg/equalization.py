"""Equalizers: closed forms of the scales that give both factors of a product the same energy.

A score is `q k^T`, and a layer's output is `o W` with the matrix W of the output projection.
Neither changes when the stored side is multiplied by an invertible E and the other side by its
inverse. All vectors are rows: keys become `k E` and queries `q E^-T`, values and outputs become
`v E` and `o E`, and W becomes `E^-1 W`. What is gained is the shape of the rows that are quantized:
no channel towers over the others while the other side hardly reads it.
"""

import math
from collections.abc import Mapping

import torch

from rotationzoo.linalg.moments import Moment

_SHIFTS = 64  # by how many parts of an octave the exponents of a head are tried shifted
CONDITION = 100.0
"""The largest condition number of a value matrix. See `value_matrix`."""
_FLOOR = 1e-8  # the least energy of a class relative to the mean; it bounds factors to about 100


def key_factors(query: torch.Tensor, key: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Factors of key channels `[H, D]`, float64, from `f^4 = c E[q^2] / E[k^2]` over the channels
    that share a factor.

    - `query`, `key`: second moments `[H, D, D]` of post-RoPE queries and keys; of keys that are
      centered, the covariance.
    - `classes`: `[H, D]` int64; channels with the same number get the same factor. Each head has
      classes of its own, or all heads have the same ones.

    Then `E[(f k)^2]` and `E[(q / f)^2]` are proportional. SmoothAttention of QServe (arXiv
    2405.04532) folds such factors, equal within RoPE pairs, from the largest magnitudes of keys.
    Factors are rounded to powers of two, which leaves bfloat16 weights exact when the factors are
    folded into them. The size of a head's keys means nothing to a codec, so c, one number for each
    head, is chosen such that rounding changes the factors least. That matters: most channels are
    alike, and must not end up on both sides of a half. On the demo model with outliers added (96
    questions, Hadamard matrix, centered keys), an answer lost 1.0 nats with unrounded factors, 1.0
    with these, 1.7 with c = 1 and 3.6 with no factors.
    """
    query_energy, key_energy = (_class_energy(side, classes) for side in (query, key))
    exponents = (query_energy.log2() - key_energy.log2()) / 4
    shifted = exponents + torch.arange(_SHIFTS)[:, None, None] / _SHIFTS
    changes = (shifted - shifted.round()).square().mean(-1)  # [shifts, H]
    best = changes.argmin(0)
    return torch.exp2(shifted[best, torch.arange(len(best))].round())


def _class_energy(moment: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The mean energy `[H, D]` of the channels of each channel's class, never below a small part of
    the mean over channels."""
    _, numbers, counts = classes.unique(return_inverse=True, return_counts=True)
    energies = moment.double().diagonal(dim1=-2, dim2=-1).flatten()
    sums = energies.new_zeros(len(counts)).index_add(0, numbers.flatten(), energies)
    energy: torch.Tensor = (sums / counts)[numbers]
    floor = _FLOOR * energy.mean(-1, keepdim=True)
    return energy.clamp(min=floor.clamp(min=torch.finfo(torch.float64).tiny))


def value_matrix(value: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """Symmetric matrices A `[H, D, D]`, float64, with `A A^T = C^-1 # M` up to a factor, the matrix
    geometric mean.

    - `value`: C `[H, D, D]`, the second moment or the covariance of values.
    - `metric`: M `[H, D, D]`, in which errors of values count: `W W^T` up to a factor.

    Then `A^T C A = A^-1 M A^-T`: in the new frame, values have the energy with which the output
    projection reads them, in every direction. The geometric mean is
    `C^-1/2 (C^1/2 M C^1/2)^1/2 C^-1/2` (Bhatia, Positive Definite Matrices, chapter 4). The
    determinant of A is 1, because the size of all rows means nothing to a codec and should mean
    nothing to the weights. The eigenvalues of A are clamped around their geometric middle first, so
    that its condition number is at most `CONDITION`; the identity holds where none is clamped. At
    that condition number, rows come back from the float32 transform and its inverse to within 7e-6
    of their norm (head dimensions up to 256); at ten times as much, to within 4e-5.
    """
    root, inverse_root = _roots(value)
    inner, _ = _roots(root @ metric.double() @ root)
    mean = inverse_root @ inner @ inverse_root
    eigenvalues, vectors = torch.linalg.eigh((mean + mean.mT) / 2)
    exponents = eigenvalues.clamp(min=torch.finfo(torch.float64).tiny).log() / 2
    middle = (exponents.amax(-1, keepdim=True) + exponents.amin(-1, keepdim=True)) / 2
    span = math.log(CONDITION) / 2
    bounded = exponents.clamp(middle - span, middle + span)
    scales = (bounded - bounded.mean(-1, keepdim=True)).exp()
    matrix: torch.Tensor = vectors @ torch.diag_embed(scales) @ vectors.mT
    return (matrix + matrix.mT) / 2


def _roots(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The square root of symmetric matrices `[H, D, D]` and its inverse. Eigenvalues below 1e-12 of
    the largest are only rounding, and are raised to that."""
    moment = moment.double()
    eigenvalues, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    largest = eigenvalues.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    roots = torch.maximum(eigenvalues, 1e-12 * largest).sqrt()
    both = (vectors @ torch.diag_embed(scale) @ vectors.mT for scale in (roots, 1 / roots))
    root, inverse = both
    return root, inverse


def fold_moments(
    moments: Mapping[str, Moment], key: torch.Tensor, value: torch.Tensor
) -> dict[str, Moment]:
    """The moments of one layer in the folded frame, by kind.

    - `moments`: those of the published weights; kinds as in `moments.Statistics`.
    - `key`: factors `[H, D]`; `value`: matrices `[H, D, D]`.

    Queries are divided by the factors and the output projection is multiplied by the inverse
    matrix; key energy, a weight of values, does not change.
    """
    transforms = frame_transforms(key, value)
    return {kind: moment.transformed(transforms[kind]) for kind, moment in moments.items()}


def frame_transforms(key: torch.Tensor, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Kind -> the matrix `[H, D, D]`, float64, by which its rows are multiplied in the folded
    frame. Arguments as in `fold_moments`."""
    factors, matrix = torch.diag_embed(key.double()), value.double()
    divided = torch.diag_embed(1 / key.double())
    return {
        "query": divided,
        "key": factors,
        "output": matrix,
        "value": matrix,
        "key_energy": matrix,
        "projection": torch.linalg.inv(matrix).mT,
    }
