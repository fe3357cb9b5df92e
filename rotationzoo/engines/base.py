"""The interface of a serving engine: the payload, the launch command, and rotation files of others.
A rotation R means `x @ R`; `formats/` transposes it if need be."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.reductions import Settled
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, cached_layers, head_dims
from rotationzoo.linalg import orthogonality
from rotationzoo.linalg.composition_table import DATA_FREE, GIVEN
from rotationzoo.sides import LATENT

PAGE = "docs/engines.md says what each engine takes"  # the hint where no option would help


@dataclass(frozen=True)
class SideMatrices:
    """The key or value rotations of every layer, as an engine's file holds them."""

    rotation: Mapping[int, torch.Tensor]
    """Layer, counted over all layers of the model -> `[H, D, D]`, or `[D, D]` if heads share it."""
    objective: str  # statistic and composition as OSCAR names them (`qqt_r_h_pbr`)
    eigenvalues: Mapping[int, torch.Tensor] = field(default_factory=dict)  # `[D]` or `[H, D]`
    mean: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The mean that is subtracted before the rotation, `[H, D]` or `[D]`; may be empty."""

    @property
    def per_head(self) -> bool:
        """Whether any layer has one matrix per KV head."""
        return any(matrix.ndim == 3 for matrix in self.rotation.values())


@dataclass(frozen=True)
class Payload:
    """What an engine gets: an artifact, reduced to what the engine takes."""

    model: str  # the model as the launch command names it
    geometry: Geometry
    key: SideMatrices
    value: SideMatrices
    group_size: int | None  # channels that share a scale; None means the whole head
    provenance: Mapping[str, Any]
    bits: Mapping[int, float]  # layer -> bits per channel of the larger side, without scales

    @property
    def largest_group(self) -> int:
        """The largest group size of any layer."""
        return self.group_size or max(layer.key_dim for layer in cached_layers(self.geometry))

    @property
    def head_dims(self) -> set[int]:
        return head_dims(self.geometry)


@dataclass(frozen=True)
class Launch:
    """How to start the engine with the exported files."""

    command: list[str]  # one or more lines
    environment: dict[str, str]
    notes: list[str]


WriteFiles = Callable[[Path, Path, Payload, Settled], Launch]
"""`write_files` of a module in `formats/`. It writes to the first folder, which is later moved to
the second. Raises `RotationZooError` for what the engine cannot run, such as a head dimension."""


def check_equal_dims(engine: str, payload: Payload) -> None:
    """Raise `RotationZooError` where the dimensions of keys and values differ."""
    for layer in cached_layers(payload.geometry):
        if layer.key_dim != layer.value_dim:
            dims = f"keys of dimension {layer.key_dim} with values of dimension {layer.value_dim}"
            raise RotationZooError(f"{engine} cannot run {dims}", hint=PAGE)


# ---- files that others made


_NEGATIVE = 1e-4  # how far rounding may push an eigenvalue below zero, relative to the largest
# The folder name that OSCAR's `compute_mla_oscar_rotation.py` gives, with the group size.
_OF_LATENTS = re.compile(r"c_kv_rcov_phblock_g([1-9]\d{0,5})")
_LONGEST_TEXT = 1000


@dataclass(frozen=True)
class RotationFile:
    """One side as a file holds it."""

    path: Path  # the file; for latents, the folder with a file for each layer
    format: str  # `V1`, `V2`, `V3`, `tensors` or `latents`
    side: str | None  # `key`, `value` or `latent`; None if neither file nor name tells
    content: SideMatrices
    calibration: Mapping[str, Any] = field(default_factory=dict)  # what the file says of it

    @property
    def group_size(self) -> int | None:
        """None if the file does not say."""
        group = self.calibration.get("group_size")
        if self.side == LATENT and (fitted := _OF_LATENTS.fullmatch(self.content.objective)):
            group = int(fitted[1])
        return group if isinstance(group, int) and group > 0 else None


def data_free_name(file: RotationFile) -> str:
    """The data-free composition that a file's objective names, or `given`."""
    # The name may end in a grouping, a mean or a side.
    plain = re.sub(r"_perhead$|_center$|-[kv]$", "", file.content.objective)
    return plain if plain in DATA_FREE else GIVEN


def check_matrices(file: RotationFile) -> None:
    """Raise `RotationZooError` for matrices, eigenvalues or means that no calibration makes."""
    content = file.content
    for layer, matrix in content.rotation.items():
        for problem in _problems(matrix, content.eigenvalues.get(layer), content.mean.get(layer)):
            raise RotationZooError(f"layer {layer} of {file.path.name} {problem}", "do not use it")


def _problems(
    matrix: torch.Tensor, eigenvalues: torch.Tensor | None, mean: torch.Tensor | None
) -> Iterator[str]:
    """What is wrong with a layer's matrix `[D, D]` or `[H, D, D]`, eigenvalues or mean."""
    if matrix.ndim not in (2, 3) or matrix.shape[-1] != matrix.shape[-2] or not matrix.numel():
        yield f"is not a square matrix, but {list(matrix.shape)}"
    if not torch.isfinite(matrix).all():
        yield "is not finite: its calibration failed"
    error = orthogonality.orthogonality_error(matrix)
    if not error <= orthogonality.ORTHOGONAL_IMPORTED:
        yield f"is not an orthogonal matrix (largest |R R^T - I| {error:.1e})"
    if eigenvalues is not None:
        if eigenvalues.shape != matrix.shape[:-1] or not torch.isfinite(eigenvalues).all():
            yield "has eigenvalues that are not finite or not of its shape"
        if eigenvalues.min() < -_NEGATIVE * eigenvalues.abs().max():
            yield "has negative eigenvalues: no second moment has"
    if mean is not None:
        # Heads that share a rotation may still have one mean each.
        shared = matrix.ndim == 2 and mean.ndim <= 2 and mean.shape[-1] == matrix.shape[-1]
        fits = shared or mean.shape == matrix.shape[:-1]
        if not fits or not torch.isfinite(mean).all():
            yield "has a mean that is not finite or not of its shape"


def objective_name(content: Any) -> str:
    """The objective that a file names, or `unknown` if it is empty, too long or not printable."""
    return content if content and is_text(content) else "unknown"


def is_text(value: Any) -> bool:
    """Whether it is printable text that is not too long."""
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT and value.isprintable()
