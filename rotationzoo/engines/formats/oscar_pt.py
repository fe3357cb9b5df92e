"""Writing the `.pt` files of OSCAR's servers.

Version 1 has one matrix per layer, version 2 one per KV head, and version 3 adds a key mean. A file
is `{format_version, objective, source_grouping, layers: {id: {layer_id, rotation, eigenvalues}}}`.
It holds only plain tensors and primitives, so that it loads with `weights_only=True`.
"""

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rotationzoo.engines.base import Payload, SideMatrices

_CALIBRATED = r"(qqt|ktk|sst|vtv)_|oscar2_|cov_eig_"


def write_pair(work: Path, payload: Payload) -> tuple[str, str]:
    """Write both sides, and return the names of the two files.

    With a key mean both sides have version 3, otherwise each has the lowest that can hold it. If
    the weights already carry the value rotation, the values get the identity instead, under its own
    name and in its lowest version.
    """
    key, value = payload.key, payload.value_or_identity
    key_name, value_name = file_name("k", key), file_name("v", value)
    version = 3 if key.mean else None
    value_version = version if payload.value is not None else None
    if value_version:  # in version 3, both files of a run share one name
        value_name = key_name.replace("k_", "v_", 1)
    write_side(work / key_name, "k", key, payload.provenance, version)
    write_side(work / value_name, "v", value, payload.provenance, value_version)
    return key_name, value_name


def file_name(letter: str, side: SideMatrices) -> str:
    """The default name of a file, which reflects its content. `letter` is `k` or `v`."""
    name = side.objective
    calibrated = re.match(_CALIBRATED, name)
    if side.mean:
        name = "oscar2_center" if calibrated else f"{name}_center"
        return f"{letter}_rotation_{name}.pt"
    if side.per_head:
        name = "perhead" if calibrated else f"{name}_perhead"
    return f"{letter}_rotation_{name}.pt"


def write_side(
    path: Path,
    letter: str,
    side: SideMatrices,
    provenance: Mapping[str, Any],
    version: int | None = None,
) -> None:
    """Write one side, for keys (`letter` is `k`) or values (`v`).

    Without a `version`, the lowest that can hold the side is used. `provenance` goes under
    `calibration`, unless it is empty.
    """
    content = _header(letter, side, version or _lowest_version(side))
    if provenance:
        content["calibration"] = dict(provenance)
    content["layers"] = {layer: _entry(side, layer) for layer in sorted(side.rotation)}
    write_pt(path, content)


def write_pt(path: Path, content: Any) -> None:
    """Write tensors and primitives as a new `.pt` file. Raises `OSError`, which torch's own writer
    does not for a full disk."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with path.open("wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def _lowest_version(side: SideMatrices) -> int:
    if side.mean:
        return 3
    return 2 if side.per_head else 1


def _header(letter: str, side: SideMatrices, version: int) -> dict[str, Any]:
    """The entries before a file's layers, in the order of OSCAR's own tools."""
    objective, grouping = side.objective, "layer"
    if version == 2:
        grouping = "per_kv_head"
        objective = f"{objective.removesuffix('_perhead')}_perhead"
    if version == 3:
        grouping = "head" if side.per_head else "layer"
        objective = f"{objective}_center"
        if re.match(_CALIBRATED, objective):
            objective = "oscar2_center" if letter == "k" else "oscar2_v_pre_wo"
    header: dict[str, Any] = {
        "format_version": version,
        "objective": objective,
        "source_grouping": grouping,
    }
    if version == 3:
        name = "key" if letter == "k" else "value"
        header["transform"] = {name: "center", "centered": bool(side.mean), "orthogonal": True}
    return header


def _entry(side: SideMatrices, layer: int) -> dict[str, Any]:
    tables = {"rotation": side.rotation, "eigenvalues": side.eigenvalues, "k_mean": side.mean}
    tensors = {
        name: tensors[layer].float().contiguous()
        for name, tensors in tables.items()
        if layer in tensors
    }
    return {"layer_id": layer, **tensors}
