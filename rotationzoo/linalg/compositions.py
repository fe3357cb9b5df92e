"""From a second moment to a rotation: eigenbasis, Hadamard matrix and bit-reversal permutation.

All vectors are rows. A key `k` is stored as `k R` and its query becomes `q R`; every rotation is
orthogonal, so attention scores do not change. The name of a composition lists its factors from left
to right, as OSCAR's published code does. `linalg.composition_table` lists the compositions.
"""

import math
from collections.abc import Callable
from functools import cache, reduce

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.composition_table import AROUND_EIGENBASIS, FIXED
from rotationzoo.linalg.orthogonality import identity, one_thread

_SYLVESTER = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
"""The Hadamard matrix of order 2; larger ones are its Kronecker powers."""


def strongest_first(directions: torch.Tensor) -> torch.Tensor:
    """Ascending eigenvalues `[..., D]`, or their eigenvectors as columns, in descending order."""
    return directions.flip(-1)


def permutation(dim: int) -> torch.Tensor:
    """`P` `[D, D]`: column `br(i)` of `X P` is `X`'s column of the i-th largest eigenvalue."""
    columns = torch.empty(dim, dtype=torch.long)
    columns[bit_reversal(dim)] = strongest_first(torch.arange(dim))
    return identity(dim)[:, columns]


@cache
def hadamard(order: int) -> torch.Tensor:
    """Normalized Hadamard matrix `[order, order]`, float64, with entries +-1/sqrt(order).

    A power of two gives the symmetric Sylvester matrix in natural order. Any other order is a
    product of the largest possible Sylvester matrix and a Paley matrix of a prime (Paley 1933,
    constructions I and II). Callers share one tensor: do not write to it. Raises
    `RotationZooError` for an order without such a matrix, as for any odd order above 1.
    """
    # From the largest Sylvester factor down, so that every order has one fixed matrix.
    for power in reversed(range(order.bit_length())):
        factor, rest = divmod(order, 1 << power)
        if rest == 0 and (core := _paley(factor)) is not None:
            root: float = order**0.5
            return reduce(torch.kron, [*[_SYLVESTER] * power, core]) / root
    problem = f"no Paley x Sylvester construction gives a Hadamard matrix of order {order}"
    raise RotationZooError(problem, "use a recipe without a Hadamard factor: composition: plain")


def _paley(order: int) -> torch.Tensor | None:
    """The +-1 Paley matrix of this order, or None. Construction I needs a prime order - 1 = 3 (mod
    4), and II a prime order / 2 - 1 = 1 (mod 4)."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order % 4 == 0 and _is_prime(order - 1):
        return identity(order) + _conference(order - 1, corner=-1)
    half = order // 2 - 1
    if order % 4 == 0 and half % 4 == 1 and _is_prime(half):
        minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(_conference(half, corner=1), _SYLVESTER) + torch.kron(
            identity(half + 1), minus
        )
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _conference(prime: int, corner: int) -> torch.Tensor:
    """The conference matrix of a prime: `chi(a - b)`, which is 1 for squares, -1 for others and 0
    for zero, bordered by a row of ones and a column of `corner`, with 0 where they meet."""
    numbers = torch.arange(prime)
    chi = torch.full((prime,), -1.0, dtype=torch.float64)
    chi[numbers.square() % prime] = 1
    chi[0] = 0
    conference = torch.nn.functional.pad(chi[(numbers[:, None] - numbers) % prime], (1, 0, 1, 0))
    conference[0, 1:] = 1
    conference[1:, 0] = corner
    return conference


def bit_reversal(order: int) -> torch.Tensor:
    """Permutation `[order]`, int64: entry i is the channel of the i-th strongest direction.

    For a power of two, entry i is i with its bits reversed. Any other order is odd * 2^k. Its
    digits are reversed, where the lowest digit counts to the odd factor: `i = d + odd * b` becomes
    `d * 2^k + reversed(b)`. So the first order / G entries land in distinct groups of G, for every
    power of two G that divides it.
    """
    bits = (order & -order).bit_length() - 1  # trailing zeros
    odd = order >> bits
    # With zero bits, the only number is formatted as "0", which reverses to 0.
    reverse = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits)]
    return torch.tensor([(i % odd << bits) + reverse[i // odd] for i in range(order)])


# Name -> the factor `[D, D]` for a dimension and a quantization group size.
_FACTORS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "block_hadamard": lambda dim, group: torch.kron(identity(dim // group), hadamard(group)),
    "hadamard": lambda dim, _: hadamard(dim),
    "permutation": lambda dim, _: permutation(dim),
}


def _multiply(names: str, dim: int, group: int) -> torch.Tensor:
    """The product of factors, float64. It is exact, because all but one of them permute rows."""
    factors = [_FACTORS[name](dim, group) for name in names.split()]
    return reduce(torch.matmul, factors, identity(dim))


def eigenbasis(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending eigenvalues `[..., D]` and eigenvectors (columns) of symmetric moments, float64.
    Each eigenvector's largest entry is made positive, so that bytes are repeatable."""
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
    """A rotation `[D, D]` that needs no statistics. Only `random` uses the seed: QR of a Gaussian
    matrix, which the signs of R make Haar distributed (Mezzadri 2007)."""
    if composition != "random":
        return _multiply(FIXED[composition], dim, dim)
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
    with one_thread():
        orthogonal, triangular = torch.linalg.qr(gaussian)
    # Without these signs, the result depends on the QR algorithm and is not uniform.
    rotation: torch.Tensor = orthogonal * triangular.diagonal().sign()
    return rotation
