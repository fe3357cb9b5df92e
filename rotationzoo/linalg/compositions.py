"""From a second moment to a rotation: eigenbasis, Hadamard matrix and bit-reversal permutation.

All vectors are rows. A key `k` is stored as `k R` and its query becomes `q R`; every rotation is
orthogonal, so attention scores do not change. A composition's name lists its factors from left to
right, as OSCAR's published code does. To add a composition, add a row to a table of
`linalg.composition_table`; recipes and `import` take it from there. A new factor is a row below.
"""

from collections.abc import Callable
from functools import reduce

import torch

from rotationzoo.linalg.composition_table import AROUND_EIGENBASIS, FIXED
from rotationzoo.linalg.hadamard import bit_reversal, hadamard
from rotationzoo.linalg.orthogonality import identity, one_thread


def strongest_first(directions: torch.Tensor) -> torch.Tensor:
    """Eigenvalues `[..., D]` or eigenvectors as columns `[..., D, D]`, largest eigenvalue first.

    The input is ascending, as everywhere. Code that wants the strongest directions asks here; code
    that pairs eigenvalues with eigenvectors only needs one order for both.
    """
    return directions.flip(-1)


def permutation(dim: int) -> torch.Tensor:
    """`P` `[D, D]`: column `br(i)` of `X P` is `X`'s column of the i-th largest eigenvalue."""
    columns = torch.empty(dim, dtype=torch.long)
    columns[bit_reversal(dim)] = strongest_first(torch.arange(dim))
    return identity(dim)[:, columns]


def block_hadamard(dim: int, group: int) -> torch.Tensor:
    """Block-diagonal Hadamard matrix `[D, D]`, which mixes each group of `group` channels."""
    return torch.kron(identity(dim // group), hadamard(group))


# Name -> the factor `[D, D]` for a dimension and a quantization group size.
_FACTORS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "block_hadamard": block_hadamard,
    "descending": lambda dim, _: strongest_first(identity(dim)),
    "hadamard": lambda dim, _: hadamard(dim),
    "permutation": lambda dim, _: permutation(dim),
    "reversal": lambda dim, _: identity(dim)[:, bit_reversal(dim)],
}


def _multiply(names: str, dim: int, group: int) -> torch.Tensor:
    """The exact product of factors, float64: all but one of them permute rows."""
    factors = [_FACTORS[name](dim, group) for name in names.split()]
    return reduce(torch.matmul, factors, identity(dim))


def eigenbasis(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending eigenvalues `[..., D]` and eigenvectors (columns) of symmetric moments, float64.

    Each eigenvector's largest-magnitude entry is made positive, so that bytes are repeatable.
    """
    moment = moment.double().cpu()
    # Sums of products are symmetric only up to rounding, and eigh reads just one triangle.
    with one_thread():
        eigenvalues, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return eigenvalues, vectors * largest.sign()


def compose(basis: torch.Tensor, composition: str, group_size: int) -> torch.Tensor:
    """`R = U F` for eigenbases U `[..., D, D]` and the factors F of a composition, float64."""
    return basis @ _multiply(AROUND_EIGENBASIS[composition], basis.shape[-1], group_size)


def recover_basis(rotation: torch.Tensor, composition: str, group_size: int) -> torch.Tensor:
    """The eigenbasis inside a composed rotation `[..., D, D]`: `U = R F^T`."""
    dim = rotation.shape[-1]
    return rotation.double() @ _multiply(AROUND_EIGENBASIS[composition], dim, group_size).mT


def data_free(dim: int, composition: str, seed: int) -> torch.Tensor:
    """A rotation `[D, D]` that needs no statistics.

    `random` uses `seed`: QR of a Gaussian matrix, Haar distributed by R's signs (Mezzadri 2007).
    """
    if composition != "random":
        return _multiply(FIXED[composition], dim, dim)
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
    with one_thread():
        orthogonal, triangular = torch.linalg.qr(gaussian)
    # Without this, the signs depend on the QR algorithm and the distribution is not uniform.
    rotation: torch.Tensor = orthogonal * triangular.diagonal().sign()
    return rotation
