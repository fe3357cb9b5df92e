"""Hadamard matrices of all Paley x Sylvester orders, and the bit-reversal permutation; float64."""

from functools import cache, reduce
from itertools import product

import torch

from rotationzoo.errors import RotationZooError

_SYLVESTER = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
"""The matrix of order 2; larger ones are its Kronecker powers."""


@cache
def hadamard(order: int) -> torch.Tensor:
    """Normalised Hadamard matrix `[order, order]`, float64, with entries +-1/sqrt(order).

    A power of two gives the symmetric Sylvester matrix in natural order. Any other order is a
    product of the largest possible Sylvester and a Paley matrix (Paley 1933, constructions I and
    II). Callers share one tensor: do not write to it.

    Raises `RotationZooError` for an order without one, such as any odd order above 1.
    """
    if order < 1:
        raise RotationZooError(f"a Hadamard matrix needs a positive order, got {order}")
    # From the largest Sylvester factor down, so that every order has one fixed matrix.
    for power in reversed(range(order.bit_length())):
        factor, rest = divmod(order, 1 << power)
        if rest == 0 and (core := _paley(factor)) is not None:
            root: float = order**0.5
            return reduce(torch.kron, [*[_SYLVESTER] * power, core]) / root
    problem = f"no Paley x Sylvester construction gives a Hadamard matrix of order {order}"
    raise RotationZooError(problem, "use a recipe without a Hadamard factor: composition: plain")


def _paley(order: int) -> torch.Tensor | None:
    """The +-1 Paley matrix of this order, or None. Construction I needs a prime power order - 1 = 3
    (mod 4), and II a prime power order / 2 - 1 = 1 (mod 4)."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    q = order - 1
    if q % 4 == 3 and (field := _prime_power(q)):
        return torch.eye(order, dtype=torch.float64) + _bordered(_jacobsthal(*field), corner=-1)
    q = order // 2 - 1
    if order % 4 == 0 and q % 4 == 1 and (field := _prime_power(q)):
        conference = _bordered(_jacobsthal(*field), corner=1)
        minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        diagonal = torch.eye(q + 1, dtype=torch.float64)
        return torch.kron(conference, _SYLVESTER) + torch.kron(diagonal, minus)
    return None


def _bordered(jacobsthal: torch.Tensor, corner: int) -> torch.Tensor:
    """The conference matrix: a Jacobsthal matrix within a zero corner, a row of ones and +-ones."""
    conference = torch.nn.functional.pad(jacobsthal, (1, 0, 1, 0))
    conference[0, 1:] = 1
    conference[1:, 0] = corner
    return conference


def _jacobsthal(prime: int, degree: int) -> torch.Tensor:
    """`chi(a - b)` for all a, b of GF(prime^degree): 1 for squares, -1 for others, 0 for zero."""
    elements = list(product(range(prime), repeat=degree))
    modulus = _irreducible(prime, degree)
    squares = {_multiply(a, a, prime, modulus) for a in elements[1:]}
    # The later tables override the earlier ones.
    chi = dict.fromkeys(elements, -1.0) | dict.fromkeys(squares, 1.0) | {elements[0]: 0.0}
    values = []
    for a, b in product(elements, repeat=2):
        values.append(chi[tuple((x - y) % prime for x, y in zip(a, b, strict=True))])
    return torch.tensor(values, dtype=torch.float64).view(len(elements), -1)


def _multiply(
    a: tuple[int, ...], b: tuple[int, ...], prime: int, modulus: tuple[int, ...]
) -> tuple[int, ...]:
    """Product of polynomials over GF(prime), modulo x^n + modulus; lowest degree first."""
    degree = len(modulus)
    full = [0] * (2 * degree - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            full[i + j] += x * y
    for top in reversed(range(degree, len(full))):
        for j, m in enumerate(modulus):
            full[top - degree + j] -= full[top] * m
    return tuple(x % prime for x in full[:degree])


def _irreducible(prime: int, degree: int) -> tuple[int, ...]:
    """Low coefficients of the first irreducible monic polynomial: no product of units is 0."""
    zero, *units = product(range(prime), repeat=degree)
    if degree == 1:
        return zero
    for modulus in product(range(prime), repeat=degree):
        if all(_multiply(a, b, prime, modulus) != zero for a in units for b in units):
            return modulus
    raise AssertionError("a field of every prime power order exists")


def _prime_power(q: int) -> tuple[int, int] | None:
    """`(p, n)` with p prime and q = p^n, or None where q is not a prime power."""
    prime = next((d for d in range(2, q + 1) if q % d == 0), None)
    if prime is None:
        return None
    degree = 0
    while q % prime == 0:
        q, degree = q // prime, degree + 1
    return (prime, degree) if q == 1 else None


def bit_reversal(order: int) -> torch.Tensor:
    """Permutation `[order]`, int64: entry i is the channel of the i-th strongest direction.

    For a power of two, entry i is i with its bits reversed. Any other order is odd * 2^k, and i a
    digit below the odd factor and k bits, all reversed: `i = d + odd * b` goes to `d * 2^k +
    reversed(b)`. So the first order / G entries land in distinct groups of G, for every power of
    two G that divides it.
    """
    bits = (order & -order).bit_length() - 1  # trailing zeros
    odd = order >> bits
    # With zero bits, the only number is formatted as "0", which reverses to 0.
    reverse = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits)]
    return torch.tensor([(i % odd << bits) + reverse[i // odd] for i in range(order)])
