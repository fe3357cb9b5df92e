"""Checks of imported rotation files: orthogonal matrices for the same layers, which are what their
names say."""

import re
from collections.abc import Mapping

import torch

from rotationzoo.engines.objectives import Described
from rotationzoo.engines.rotation_file import Pair, RotationFile
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg import compositions
from rotationzoo.linalg.compositions import DATA_FREE

# Entries of `calibration` that agree in both files of one run.
_SHARED = ("generation_id", "config_sha256", "model")
_CLOSE = 1e-4  # the tolerance for an entry of a permutation or a Hadamard matrix
# How far rounding may push an eigenvalue below zero, relative to the largest.
_NEGATIVE = 1e-4
_DO_NOT_USE = "do not use it"
_FETCH_AGAIN = "fetch both again"


def check_pair(pair: Pair, described: Mapping[str, Described]) -> None:
    """Raise `RotationZooError` unless both sides hold orthogonal matrices for the same layers, and
    are what their names say.

    `described` maps each side to what its file states.
    """
    for file in pair:
        check_matrices(file)
    _check_same_layers(pair)
    _check_same_run(pair)
    for side, file in pair.items():
        _check_name(file, described[side])
    _check_different(pair, described)


def check_matrices(file: RotationFile) -> None:
    """Raise `RotationZooError` unless every matrix is square, finite and orthogonal, and its
    eigenvalues and mean are finite and of matching shape."""
    for layer, matrix in file.content.rotation.items():
        label = f"layer {layer} of {file.path.name}"
        _check_matrix(label, matrix)
        eigenvalues, mean = file.content.eigenvalues.get(layer), file.content.mean.get(layer)
        if eigenvalues is not None:
            _check_eigenvalues(label, eigenvalues, matrix)
        if mean is not None:
            _check_mean(label, mean, matrix)


def _check_matrix(label: str, matrix: torch.Tensor) -> None:
    if matrix.ndim not in (2, 3) or matrix.shape[-1] != matrix.shape[-2] or not matrix.numel():
        raise RotationZooError(f"{label} is no square matrix, but {list(matrix.shape)}")
    if not torch.isfinite(matrix).all():
        raise RotationZooError(
            f"{label} is not finite", hint="do not use it: its calibration failed"
        )
    error = compositions.orthogonality_error(matrix)
    if not error <= compositions.ORTHOGONAL_IMPORTED:
        raise RotationZooError(
            f"{label} is no orthogonal matrix (largest |R R^T - I| {error:.1e})", hint=_DO_NOT_USE
        )


def _check_eigenvalues(label: str, eigenvalues: torch.Tensor, matrix: torch.Tensor) -> None:
    if eigenvalues.shape != matrix.shape[:-1] or not torch.isfinite(eigenvalues).all():
        raise RotationZooError(
            f"{label} has eigenvalues that are not finite or not of its shape", hint=_DO_NOT_USE
        )
    if eigenvalues.min() < -_NEGATIVE * eigenvalues.abs().max():
        raise RotationZooError(
            f"{label} has negative eigenvalues: no second moment has", hint=_DO_NOT_USE
        )


def _check_mean(label: str, mean: torch.Tensor, matrix: torch.Tensor) -> None:
    # Heads that share a rotation may still have one mean each.
    shared = matrix.ndim == 2 and mean.ndim <= 2 and mean.shape[-1] == matrix.shape[-1]
    fits = mean.shape == matrix.shape[:-1] or shared
    if not fits or not torch.isfinite(mean).all():
        raise RotationZooError(
            f"{label} has k_mean that are not finite or not of its shape", hint=_DO_NOT_USE
        )


def _check_same_layers(pair: Pair) -> None:
    key_layers, value_layers = (file.content.rotation.keys() for file in pair)
    if missing := sorted(key_layers ^ value_layers):
        lacking = pair.value if missing[0] in key_layers else pair.key
        raise RotationZooError(
            f"{lacking.path.name} has no layer {missing[0]}, and the other side has",
            hint=_FETCH_AGAIN,
        )


def _check_same_run(pair: Pair) -> None:
    for name in _SHARED:
        if pair.key.calibration.get(name) != pair.value.calibration.get(name):
            files = f"{pair.key.path.name} and {pair.value.path.name}"
            raise RotationZooError(
                f"{files} do not belong together: their {name} differs", hint=_FETCH_AGAIN
            )


def _check_name(file: RotationFile, described: Described) -> None:
    """Raise `RotationZooError` for an identity, permutation or Hadamard matrix under the name of a
    calibrated rotation."""
    calibrated_name = re.search(r"_(qqt|ktk|sst|vtv)_", file.path.stem)
    # A file may hold such a matrix if neither its content nor its name claims otherwise.
    if described.composition in DATA_FREE and not calibrated_name:
        return
    for layer, matrix in file.content.rotation.items():
        if kind := _data_free_kind(matrix):
            name = file.path.name
            raise RotationZooError(
                f"{name} holds {kind} in layer {layer} under the name of a calibrated one",
                hint="if that is what you want: "
                "rotationzoo calibrate MODEL --recipe hadamard (or identity)",
            )


def _check_different(pair: Pair, described: Mapping[str, Described]) -> None:
    """Raise `RotationZooError` if both files hold the same matrices: one was fetched twice.

    Only data-free rotations may be the same for keys and values.
    """
    if described["key"].composition in DATA_FREE:
        return
    keys, values = (file.content.rotation for file in pair)
    if all(torch.equal(keys[layer], values[layer]) for layer in keys):
        raise RotationZooError(
            f"{pair.key.path.name} and {pair.value.path.name} hold the same matrices",
            hint=_FETCH_AGAIN,
        )


def _data_free_kind(matrix: torch.Tensor) -> str | None:
    """The name of `[.., D, D]` if all of it is data-free: the identity, a permutation up to
    signs, or a Hadamard matrix in any order and with any signs. None otherwise."""
    size = matrix.abs()
    is_permutation = ((size < _CLOSE) | ((size - 1).abs() < _CLOSE)).all()
    if is_permutation:
        ones = torch.ones(matrix.shape[:-1])
        is_identity = torch.equal(matrix.diagonal(dim1=-2, dim2=-1), ones)
        return "the identity matrix" if is_identity else "a permutation"
    # All entries of an orthogonal Hadamard matrix have the magnitude D^-0.5.
    is_hadamard = ((size - matrix.shape[-1] ** -0.5).abs() < _CLOSE).all()
    return "a Hadamard matrix" if is_hadamard else None
