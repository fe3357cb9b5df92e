"""Shared checks for reading untrusted rotation files, in which nothing is used unchecked, and the
limits on a model's geometry that several engines share.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rotationzoo.engines.base import Payload
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import cached_layers
from rotationzoo.model.files import MOST_LAYERS

PAGE = "docs/engines.md says what each engine takes"
"""The hint for limits that no flag can lift."""


def check_limits(
    engine: str, payload: Payload, powers: bool = False, equal: bool = False, groups: bool = False
) -> None:
    """Raise `RotationZooError` for what an engine cannot run: heads whose dimension is no power of
    two, keys and values that differ in dimension, or groups that no one size describes, which are
    whole heads of different dimensions."""
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


_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LONGEST_TEXT = 1000


def as_mapping(content: Any) -> Mapping[str, Any]:
    """The content if it is a table, else an empty one. Untrusted files may hold anything there."""
    return content if isinstance(content, Mapping) else {}


def primitives(content: Any) -> dict[str, str | int | float]:
    """The entries of a table that a manifest can hold: printable text, finite numbers and
    booleans."""
    return {
        name: value
        for name, value in as_mapping(content).items()
        if _is_text(name) and _is_primitive(value)
    }


def objective_name(content: Any) -> str:
    """The objective that a file names, or `unknown` if it is empty, too long or not printable."""
    return content if content and _is_text(content) else "unknown"


def check_layer(path: Path, layer: int | str) -> int:
    """The layer's number as an integer. Raises `RotationZooError` for one that no model has."""
    if int(layer) >= MOST_LAYERS:
        raise RotationZooError(
            f"{path.name} has a layer {layer}, and no model has", hint="do not use it"
        )
    return int(layer)


def check_tensor(path: Path, label: str, tensor: torch.Tensor) -> None:
    """Raise `RotationZooError` unless a tensor is dense, real floating-point, and neither empty nor
    a scalar.

    Sparse, quantized and complex tensors are refused, among others.
    """
    plain = tensor.layout == torch.strided and tensor.dtype in _REAL and tensor.ndim
    if not plain or not tensor.numel():
        raise RotationZooError(
            f"the {label} in {path.name} is no table of real numbers", hint="do not use it"
        )


def check_regular(path: Path) -> None:
    """Raise `RotationZooError` unless `path` is a regular file that this user may read.

    Reading a pipe or a device could block for ever.
    """
    if not path.exists():
        raise RotationZooError(f"there is no file {path}", hint="check the path")
    if not path.is_file():
        raise RotationZooError(f"{path} is no regular file", hint="give a file")
    if not os.access(path, os.R_OK):
        raise RotationZooError(f"{path} cannot be read: permission denied", hint="check the path")


def _is_primitive(value: Any) -> bool:
    if isinstance(value, int | float):
        return abs(value) < 2**63 and math.isfinite(value)
    return _is_text(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT and value.isprintable()
