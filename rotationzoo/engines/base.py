"""The interface of a serving engine: the payload that it receives, its launch command, and what a
rotation file that others made says and must hold.

Everywhere else a rotation R is applied as `x @ R`; `formats/` transposes it if need be.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.reductions import Settled
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, cached_layers, head_dims
from rotationzoo.linalg import orthogonality
from rotationzoo.linalg.composition_table import DATA_FREE, GIVEN
from rotationzoo.model.files import MOST_LAYERS
from rotationzoo.sides import LATENT

PAGE = "docs/engines.md says what each engine takes"
"""The hint for limits that no flag can lift."""


@dataclass(frozen=True)
class SideMatrices:
    """The key or value rotations of every layer, as an engine's file holds them."""

    rotation: Mapping[int, torch.Tensor]
    """Layer -> float32 `[D, D]`, shared by the layer's KV heads, or `[H, D, D]`.

    Layer numbers count all layers of the model, also those without a KV cache.
    """
    objective: str
    """Statistic and composition in OSCAR's words (`qqt_r_h_pbr`), or a data-free name."""
    eigenvalues: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> `[D]` or `[H, D]`; empty if a file has none."""
    mean: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> the mean subtracted before the rotation, `[H, D]` or `[D]`; empty without one."""

    @property
    def per_head(self) -> bool:
        """Whether any layer has one matrix per KV head."""
        return any(matrix.ndim == 3 for matrix in self.rotation.values())


@dataclass(frozen=True)
class Payload:
    """The input of an engine: an artifact, reduced to what the engine takes."""

    model: str
    """The model as the launch command names it."""
    geometry: Geometry
    key: SideMatrices
    value: SideMatrices
    group_size: int | None
    """Channels that share a scale; None means the whole head."""
    provenance: Mapping[str, Any]
    bits: Mapping[int, float]
    """Layer -> bits of a channel, of the side that has more, without scales."""

    @property
    def largest_group(self) -> int:
        """The largest number of channels that share a scale, over all layers."""
        return self.group_size or max(layer.key_dim for layer in cached_layers(self.geometry))

    @property
    def head_dims(self) -> set[int]:
        """All head dimensions, of keys and of values, that occur in any layer."""
        return head_dims(self.geometry)


@dataclass(frozen=True)
class Launch:
    """How to start the engine with the exported files."""

    command: list[str]
    """One or more lines."""
    environment: dict[str, str]
    notes: list[str]


WriteFiles = Callable[[Path, Path, Payload, Settled], Launch]
"""`write_files` of a module in `formats/`, which writes to the first folder, later moved to the
second. Raises `RotationZooError` for what the engine cannot run, such as a head dimension."""


def clip_text(ratio: float, off: float) -> str:
    """A clip ratio as text. No clipping, 1 in this package, becomes the engine's number `off`."""
    return f"{off if ratio == 1 else ratio:g}"


def check_limits(
    engine: str, payload: Payload, powers: bool = False, equal: bool = False, groups: bool = False
) -> None:
    """Raise `RotationZooError` for dimensions that an engine cannot run: no powers of two, keys
    unlike values, or groups of whole heads of several sizes."""
    dims, problems = sorted(payload.head_dims), []
    if powers and (others := [dim for dim in dims if dim & (dim - 1)]):
        problems.append(f"cannot run head dimension {others[0]}: only powers of two")
    for layer in cached_layers(payload.geometry):
        if equal and layer.key_dim != layer.value_dim:
            values = f"values of dimension {layer.value_dim}"
            problems.append(f"cannot run keys of dimension {layer.key_dim} with {values}")
    if groups and payload.group_size is None and len(dims) > 1:
        whole = f"this artifact's groups are whole heads of {dims} channels"
        problems.append(f"takes one group size, and {whole}")
    if problems:
        raise RotationZooError(f"{engine} {problems[0]}", hint=PAGE)


# ---- files that others made


# How far rounding may push an eigenvalue below zero, relative to the largest.
_NEGATIVE = 1e-4
# OSCAR's `compute_mla_oscar_rotation.py` names folders so: permutation, block Hadamard.
_OF_LATENTS = re.compile(r"c_kv_rcov_phblock_g([1-9]\d{0,5})")

_LONGEST_TEXT = 1000


@dataclass(frozen=True)
class RotationFile:
    """One side as a file holds it."""

    path: Path
    """The file; for latents, the folder with a file for each layer."""
    format: str
    """`V1`, `V2`, `V3`, `tensors` or `latents`."""
    side: str | None
    """`key`, `value` or `latent`; None if neither the file nor its name says which."""
    content: SideMatrices
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """The file's own statement of how it was made."""
    notes: tuple[str, ...] = ()

    @property
    def group_size(self) -> int | None:
        """Channels that share a scale; None if the file does not say."""
        group = self.calibration.get("group_size")
        if self.side == LATENT and (fitted := _OF_LATENTS.fullmatch(self.content.objective)):
            group = int(fitted[1])
        return group if isinstance(group, int) and group > 0 else None


def normalize(file: RotationFile) -> RotationFile:
    """The file in float32."""
    name, notes, matrices = file.path.name, list(file.notes), file.content.rotation
    if any(matrix.dtype != torch.float32 for matrix in matrices.values()):
        notes.append(f"{name} is not float32; its matrices were converted")
    matrices = {layer: matrix.float().contiguous() for layer, matrix in matrices.items()}
    eigenvalues = {layer: values.float() for layer, values in file.content.eigenvalues.items()}
    content = replace(file.content, rotation=matrices, eigenvalues=eigenvalues)
    return replace(file, content=content, notes=tuple(notes))


def data_free_name(file: RotationFile) -> str:
    """The composition that a file's objective names, if it is made without data; else `given`."""
    # Such names may have a suffix for their grouping, a mean or a side.
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


def as_mapping(content: Any) -> Mapping[str, Any]:
    """The content if it is a table, else an empty one. Untrusted files may hold anything there."""
    return content if isinstance(content, Mapping) else {}


def primitives(content: Any) -> dict[str, str | int | float]:
    """The entries that a manifest can hold: printable text, finite numbers and booleans."""
    entries = {}
    for name, value in as_mapping(content).items():
        is_number = isinstance(value, int | float) and abs(value) < 2**63 and math.isfinite(value)
        if _is_text(name) and (is_number or _is_text(value)):
            entries[name] = value
    return entries


def objective_name(content: Any) -> str:
    """The objective that a file names, or `unknown` if it is empty, too long or not printable."""
    return content if content and _is_text(content) else "unknown"


def check_layer(path: Path, layer: int | str) -> int:
    """The layer's number as an integer. Raises `RotationZooError` for one that no model has."""
    if int(layer) >= MOST_LAYERS:
        hint = "do not use it"
        raise RotationZooError(f"{path.name} has a layer {layer}, and no model has", hint)
    return int(layer)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT and value.isprintable()
