"""The interface of a serving engine: the payload that it receives, and its launch command.

Everywhere else a rotation R is applied as `x @ R`; `formats/` transposes it if need be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.reductions import Settled
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import Geometry, cached_layers, head_dims

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
