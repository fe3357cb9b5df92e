"""From a second moment to a rotation: compositions of its eigenbasis, Hadamard matrices and a
bit-reversal permutation.

All vectors are rows. A key `k` is stored as `k R` and its query becomes `q R`; every rotation is
orthogonal, so attention scores do not change. A composition's name lists its factors from left to
right, as OSCAR's published code does. To add a composition, add a row to a table below;
`COMPOSITIONS`, recipes and `import` take it from there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.hadamard import bit_reversal, hadamard

Factors = tuple[torch.Tensor, torch.Tensor]
# Largest allowed `|R R^T - I|` of the stored float32 matrices; 8e-8 was measured for D up to 512.
ORTHOGONAL = 1e-6
# Largest allowed `|T T^-1 - I|` in float64; 2e-13 was measured for whitenings with D up to 512.
INVERTED = 1e-8
# `ORTHOGONAL` for imported files: the tolerance of SGLang's loader. The published files reach 3e-8.
ORTHOGONAL_IMPORTED = 5e-3


def strongest_first(directions: torch.Tensor) -> torch.Tensor:
    """Eigenvalues `[..., D]` or eigenvectors as columns `[..., D, D]`, largest eigenvalue first.

    The input is ascending, as in `eigenbasis`, artifacts and the published files; imports are
    brought into that order. Whoever wants the strongest directions asks here or `strongest`. Code
    that pairs eigenvalues with their eigenvectors needs no more than that both have one order.
    """
    return directions.flip(-1)


def strongest(directions: torch.Tensor, count: int) -> torch.Tensor:
    """The eigenvalues, or eigenvectors as columns, of the `count` largest eigenvalues, still
    ascending."""
    return directions[..., -count:]


def identity(dim: int) -> torch.Tensor:
    """The identity `[D, D]`, float64."""
    return torch.eye(dim, dtype=torch.float64)


def permutation(dim: int) -> torch.Tensor:
    """`P` `[D, D]`: column `br(i)` of `X P` is the column of `X` with the i-th largest eigenvalue.

    It depends only on the order of the eigenvalues, so P is the same matrix for every model and
    layer.
    """
    columns = torch.empty(dim, dtype=torch.long)
    columns[bit_reversal(dim)] = strongest_first(torch.arange(dim))
    return identity(dim)[:, columns]


def descending(dim: int) -> torch.Tensor:
    """`[D, D]`: the columns of `X descending(D)` are those of `X`, sorted by descending
    eigenvalue."""
    return strongest_first(identity(dim))


def block_hadamard(dim: int, group: int) -> torch.Tensor:
    """Block-diagonal Hadamard matrix `[D, D]`. It mixes each quantization group of `group` channels
    on its own."""
    return torch.kron(identity(dim // group), hadamard(group))


# Name -> (left, right) with R = left U right, where U is the eigenbasis; `group` is the
# quantization group size.
_AROUND_EIGENBASIS: dict[str, Callable[[int, int], Factors]] = {
    "plain": lambda dim, group: (identity(dim), identity(dim)),
    "br": lambda dim, group: (identity(dim), permutation(dim)),
    "br_h128": lambda dim, group: (identity(dim), permutation(dim) @ hadamard(dim)),
    "r_h": lambda dim, group: (identity(dim), hadamard(dim)),
    "h_r_pbr": lambda dim, group: (hadamard(dim), permutation(dim)),
    "h_pbr_r": lambda dim, group: (hadamard(dim) @ permutation(dim), identity(dim)),
    "r_h_pbr": lambda dim, group: (identity(dim), hadamard(dim) @ permutation(dim)),
    # Eigenvectors in descending order, as in the published per-head files and in the calibrator of
    # a llama.cpp fork.
    "rdesc_h": lambda dim, group: (identity(dim), descending(dim) @ hadamard(dim)),
    "rdesc_h_br": lambda dim, group: (
        identity(dim),
        descending(dim) @ hadamard(dim)[:, bit_reversal(dim)],
    ),
    # Permuting before a block-diagonal Hadamard matrix sends strong directions to different groups.
    "r_pbr_hblock": lambda dim, group: (
        identity(dim),
        permutation(dim) @ block_hadamard(dim, group),
    ),
}
_DATA_FREE: dict[str, Callable[[int], torch.Tensor]] = {
    "identity": identity,
    "hadamard": hadamard,
    "pbr": permutation,
    "h_pbr": lambda dim: hadamard(dim) @ permutation(dim),
}
DATA_FREE = (*_DATA_FREE, "random")
"""Compositions without an eigenbasis. Only `random` uses a seed."""
COMPOSITIONS = (*_AROUND_EIGENBASIS, *DATA_FREE)
"""The name of every composition that a recipe may ask for."""
GIVEN = "given"
"""The composition of matrices that someone else computed, whose factors are unknown."""


def needs_statistics(composition: str) -> bool:
    """Whether the composition contains an eigenbasis, and therefore needs statistics."""
    return composition in _AROUND_EIGENBASIS


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread. LAPACK's threads wait for each other at every column of a
    matrix: with D = 128, two are 1.2 times as fast as one, and 32 on two CPUs 20 to 30 times as
    slow. Once torch's threads have been set, as here, batched LU (`inv`, `solve`, `det`) by several
    threads of MKL fails from D = 160 on, with an error or without one (torch 2.13): see `invert`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def eigenbasis(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending eigenvalues `[..., D]` and eigenvectors as columns `[..., D, D]` of a symmetric
    moment, in float64.

    The sign of an eigenvector is arbitrary. Its largest-magnitude entry is made positive, so that
    one kind of machine writes the same bytes twice.
    """
    moment = moment.double().cpu()
    # Sums of products are symmetric only up to rounding, and eigh reads just one triangle.
    with one_thread():
        eigenvalues, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return eigenvalues, vectors * largest.sign()


def invert(matrices: torch.Tensor) -> torch.Tensor:
    """The inverses `[..., D, D]` of matrices, float64 on the CPU. Raises `RotationZooError` for a
    product that is not the identity: a matrix is singular, or LAPACK failed."""
    matrices = matrices.double().cpu()
    with one_thread():
        inverses: torch.Tensor = torch.linalg.inv_ex(matrices).inverse
    error = (matrices @ inverses - identity(matrices.shape[-1])).abs().max().item()
    if not error <= INVERTED:  # NaN is never at most what is allowed
        raise RotationZooError(
            f"a matrix has no inverse: its product is off by {error:.0e}",
            hint="verify the rotations; if they are sound, run again with OMP_NUM_THREADS=1",
        )
    return inverses


def compose(basis: torch.Tensor, composition: str, group_size: int) -> torch.Tensor:
    """`R = left U right` for eigenbases U `[..., D, D]`, float64."""
    left, right = _AROUND_EIGENBASIS[composition](basis.shape[-1], group_size)
    return left @ basis @ right


def recover_basis(rotation: torch.Tensor, composition: str, group_size: int) -> torch.Tensor:
    """The eigenbasis inside a composed rotation `[..., D, D]`: `U = left^T R right^T`, exact up to
    rounding."""
    left, right = _AROUND_EIGENBASIS[composition](rotation.shape[-1], group_size)
    return left.mT @ rotation.double() @ right.mT


def data_free(dim: int, composition: str, seed: int) -> torch.Tensor:
    """A rotation `[D, D]` that needs no statistics.

    Only `random` uses `seed`. It is Haar distributed: QR of a Gaussian matrix, with the signs of
    R's diagonal moved into Q (Mezzadri 2007).
    """
    if composition != "random":
        return _DATA_FREE[composition](dim)
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
    with one_thread():
        orthogonal, triangular = torch.linalg.qr(gaussian)
    # Without this, the signs depend on the QR algorithm and the distribution is not uniform.
    rotation: torch.Tensor = orthogonal * triangular.diagonal().sign()
    return rotation


def allowed_error(imported: bool) -> float:
    """The largest `|R R^T - I|` that a stored float32 matrix may have."""
    return ORTHOGONAL_IMPORTED if imported else ORTHOGONAL


def is_orthogonal(rotation: torch.Tensor, imported: bool) -> bool:
    """Whether all float32 matrices `[H, D, D]` are orthogonal. It is computed in float32 first, so
    that it can be asked whenever a large model's rotations are read.

    A product of two rows of length 1 is rounded by at most `D u`, with `u = 2^-24` (Higham 2002,
    section 3.1): 7.6e-6 at D = 128. So this passes whatever passes in float64, and little more.
    """
    dim, allowed = rotation.shape[-1], allowed_error(imported)
    error = (rotation @ rotation.mT - torch.eye(dim)).abs().max().item()
    # Where a caller lets torch multiply in fewer bits, float64 decides. NaN, from an overflow, is
    # never at most what is allowed.
    return error <= allowed + dim * 2.0**-24 or orthogonality_error(rotation) <= allowed


def orthogonality_error(rotation: torch.Tensor) -> float:
    """`max |R R^T - I|` over all matrices `[..., D, D]`, computed in float64."""
    rotation = rotation.double()
    return (rotation @ rotation.mT - identity(rotation.shape[-1])).abs().max().item()
