"""Whether matrices are orthogonal, and the inverses of those that are not."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rotationzoo.errors import RotationZooError

# Largest allowed `|R R^T - I|` of the stored float32 matrices; 8e-8 was measured for D up to 512.
ORTHOGONAL = 1e-6
# Largest allowed `|T T^-1 - I|` in float64; 2e-13 was measured for whitenings with D up to 512.
INVERTED = 1e-8
# `ORTHOGONAL` for imported files: the tolerance of SGLang's loader. The published files reach 3e-8.
ORTHOGONAL_IMPORTED = 5e-3


def identity(dim: int) -> torch.Tensor:
    """The identity `[D, D]`, float64."""
    return torch.eye(dim, dtype=torch.float64)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread. LAPACK's threads wait for each other at every column of a
    matrix: with D = 128, two are 1.2 times as fast as one, and 32 on two CPUs 20 to 30 times
    slower. After this, batched LU (`inv`, `solve`, `det`) with several threads of MKL fails from D
    = 160 on, with or without an error (torch 2.13): see `invert`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def invert(matrices: torch.Tensor) -> torch.Tensor:
    """The inverses `[..., D, D]`, float64 on the CPU. Raises `RotationZooError` if a product is not
    the identity: for a singular matrix, or if LAPACK fails."""
    matrices = matrices.double().cpu()
    with one_thread():
        inverses: torch.Tensor = torch.linalg.inv_ex(matrices).inverse
    error = (matrices @ inverses - identity(matrices.shape[-1])).abs().max().item()
    if not error <= INVERTED:  # also refuses NaN
        hint = "verify the rotations; if they are sound, run again with OMP_NUM_THREADS=1"
        raise RotationZooError(f"a matrix has no inverse: its product is off by {error:.0e}", hint)
    return inverses


def allowed_error(imported: bool) -> float:
    """The largest `|R R^T - I|` that a stored float32 matrix may have."""
    return ORTHOGONAL_IMPORTED if imported else ORTHOGONAL


def is_orthogonal(rotation: torch.Tensor, imported: bool) -> bool:
    """Whether all float32 matrices `[H, D, D]` are orthogonal, first in float32, for speed.

    The rounding error of a product of two unit rows is at most `D u`, with `u = 2^-24` (Higham
    2002, section 3.1): 7.6e-6 at D = 128. So this passes all that float64 passes, and little more.
    """
    dim, allowed = rotation.shape[-1], allowed_error(imported)
    error = (rotation @ rotation.mT - torch.eye(dim)).abs().max().item()
    # float64 decides where a caller lets torch multiply in fewer bits. NaN is never allowed.
    return error <= allowed + dim * 2.0**-24 or orthogonality_error(rotation) <= allowed


def orthogonality_error(rotation: torch.Tensor) -> float:
    """`max |R R^T - I|` over all matrices `[..., D, D]`, computed in float64."""
    rotation = rotation.double()
    return (rotation @ rotation.mT - identity(rotation.shape[-1])).abs().max().item()
