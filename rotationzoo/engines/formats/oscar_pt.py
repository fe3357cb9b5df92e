"""The `.pt` files of OSCAR's servers: versions 1 (a matrix a layer), 2 (one a KV head) and 3 (with
a key mean).

`{format_version, objective, source_grouping, layers: {id: {layer_id, rotation, eigenvalues}}}`:
plain tensors and primitives, so that they load with `weights_only=True`. Nothing else is ever
unpickled here.
"""

import io
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from rotationzoo.engines.base import (
    MOST_LAYERS,
    WORDS,
    Payload,
    RotationFile,
    Side,
    check_regular,
    check_tensor,
    identity_like,
    mapping,
    named,
    primitives,
)
from rotationzoo.errors import RotationZooError

_SIDE_OF = {
    theirs: "key" if ours in ("query", "key") else "value" for theirs, ours in WORDS.items()
}
_CALIBRATED = r"(qqt|ktk|sst|vtv)_|oscar2_|cov_eig_"
_COMPANIONS = ("q_rotation", "o_rotation")  # of rotations that are not orthogonal
_TENSORS = ("rotation", "eigenvalues", "k_mean")
_MOST_SHARED = (
    1 << 28
    # bytes beyond the file's own that layers sharing one matrix may take: a Hadamard file of any model
)


def file_name(letter: str, side: Side) -> str:
    """The default name of a file, which says honestly what is in it."""
    calibrated = re.match(_CALIBRATED, side.objective)
    if side.mean:
        return (
            f"{letter}_rotation_oscar2_center.pt"
            if calibrated
            else f"{letter}_rotation_{side.objective}_center.pt"
        )
    if side.per_head:
        return (
            f"{letter}_rotation_perhead.pt"
            if calibrated
            else f"{letter}_rotation_{side.objective}_perhead.pt"
        )
    return f"{letter}_rotation_{side.objective}.pt"


def write(
    path: Path, letter: str, side: Side, provenance: Mapping[str, Any], version: int | None = None
) -> None:
    """Write one side; the version is the lowest that can hold it. `provenance` goes under
    `calibration`, unless it is empty."""
    version = version or (3 if side.mean else 2 if side.per_head else 1)
    objective, grouping = side.objective, "layer"
    if version == 2:
        grouping = "per_kv_head"
        objective += "" if objective.endswith("_perhead") else "_perhead"
    if version == 3:
        grouping = "head" if side.per_head else "layer"
        objective = f"{objective}_center"
        if re.match(_CALIBRATED, objective):
            objective = "oscar2_center" if letter == "k" else "oscar2_v_pre_wo"
    content: dict[str, Any] = {
        "format_version": version,
        "objective": objective,
        "source_grouping": grouping,
    }
    if version == 3:
        content["transform"] = {
            "key" if letter == "k" else "value": "center",
            "centered": bool(side.mean),
            "orthogonal": True,
        }
    if provenance:
        content["calibration"] = dict(provenance)
    content["layers"] = {
        layer: {"layer_id": layer}
        | {
            name: tensors[layer].float().contiguous()
            for name, tensors in (
                ("rotation", side.rotation),
                ("eigenvalues", side.eigenvalues),
                ("k_mean", side.mean),
            )
            if layer in tensors
        }
        for layer in sorted(side.rotation)
    }
    buffer = io.BytesIO()  # torch's own writer turns a full disk into an error of another kind
    torch.save(content, buffer)
    with path.open("wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def write_pair(work: Path, serving: Payload) -> tuple[str, str]:
    """Write both sides in the version that holds the keys; returns their names. Values that the
    weights carry rotated already get the identity, under its own name."""
    value = serving.value or identity_like(serving.key, serving.geometry)
    names = file_name("k", serving.key), file_name("v", value)
    version = 3 if serving.key.mean else None
    if version and serving.value is not None:  # the files of one run carry one name
        names = names[0], names[0].replace("k_", "v_", 1)
    write(work / names[0], "k", serving.key, serving.provenance, version)
    write(
        work / names[1],
        "v",
        value,
        serving.provenance,
        version if serving.value is not None else None,
    )
    return names


def read(path: Path) -> RotationFile:
    """Raises `RotationZooError` for what is no rotation file, or one whose entries contradict each
    other."""
    content = _load(path)
    table = content if isinstance(content, Mapping) else {}
    layers = _layers(path, content)
    transform = mapping(table.get("transform"))
    if (
        any(name in entry for entry in layers.values() for name in _COMPANIONS)
        or transform.get("orthogonal") is False
    ):
        raise RotationZooError(
            f"{path.name} holds rotations that are not orthogonal, with a second matrix for queries or outputs",
            hint="ask for orthogonal ones: 2-bit rows of one scale do not survive the others",
        )
    tensors: dict[str, dict[int, torch.Tensor]] = {}
    for name in _TENSORS:
        tensors[name] = {
            i: entry[name]
            for i, entry in layers.items()
            if isinstance(entry.get(name), torch.Tensor)
        }
        if tensors[name] and (without := sorted(layers.keys() - tensors[name].keys())):
            raise RotationZooError(
                f"{path.name} has no {name} for layer {without[0]}, and has for others"
            )
    for name, found in tensors.items():
        for layer, tensor in found.items():
            check_tensor(path, f"{name} of layer {layer}", tensor)
    if not tensors["rotation"]:
        raise RotationZooError(f"{path.name} is no rotation file: its layers have no rotation")
    objective = named(table.get("objective"))
    side = Side(tensors["rotation"], objective, tensors["eigenvalues"], tensors["k_mean"])
    return RotationFile(
        path,
        _version(table, side),
        side_of(path, objective, table),
        side,
        primitives(table.get("calibration")),
    )


def side_of(path: Path, objective: str, table: Mapping[str, Any]) -> Literal["key", "value"] | None:
    """What a file holds, from its name and from what it says itself. Raises `RotationZooError` if
    the two differ."""
    named = (
        {"k": "key", "v": "value"}.get(path.stem[:1]) if re.match(r"[kv](_|$)", path.stem) else None
    )
    said = _SIDE_OF.get(objective.split("_")[0]) or {
        "identity-k": "key",
        "identity-v": "value",
    }.get(objective)
    said = said or next(
        (side for side in ("key", "value") if side in mapping(table.get("transform"))), None
    )
    if objective.startswith("optr_output_aware_"):
        said = "key" if objective.endswith("_k") else "value"
    if objective.startswith("oscar2_v_"):
        said = "value"
    if named and said and named != said:
        raise RotationZooError(
            f"{path.name} is named as {named}s and says that it holds {said}s (objective {objective}): they are swapped",
            hint="do not use it, or give the files their right names",
        )
    return named or said  # type: ignore[return-value]


def _load(path: Path) -> Any:
    """What a file holds. Its tensors are looked at without their numbers first: a few bytes can ask
    for terabytes."""
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > path.stat().st_size:
            raise RotationZooError(
                f"{path.name} is no rotation file: it unpacks to {unpacked:,} bytes and has {path.stat().st_size:,}",
                hint="do not use it",
            )
        _check_sizes(path, torch.load(path, map_location="meta", weights_only=True))
        return torch.load(path, map_location="cpu", weights_only=True)
    except RotationZooError:
        raise
    except OSError as error:
        raise RotationZooError(
            f"{path} cannot be read: {error.strerror}", hint="check the path"
        ) from error
    except Exception as error:  # pickle and zip files fail in many ways
        raise RotationZooError(
            f"{path.name} is no rotation file: it cannot be opened as plain tensors with layers",
            hint="do not use it; files that need to run code when they are opened are refused",
        ) from error


def _check_sizes(path: Path, content: Any) -> None:
    """Raise `RotationZooError` where the tensors, as shapes, ask for more than the file can
    hold."""
    size, total = path.stat().st_size, 0
    entries = _layers(path, content).values()
    for tensor in (entry.get(name) for entry in entries for name in _TENSORS):
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            wanted = tensor.numel() * tensor.itemsize
            total += wanted
            if max(wanted, tensor.untyped_storage().nbytes()) > size or total > size + _MOST_SHARED:
                raise RotationZooError(
                    f"{path.name} is no rotation file: its tensors ask for {total:,} bytes and it has {size:,}",
                    hint="do not use it",
                )


def _layers(path: Path, content: Any) -> dict[int, dict[str, Any]]:
    """Layer -> entry, for a table of layers, a bare table of tensors, or all layers stacked in one
    tensor."""
    if isinstance(content, torch.Tensor) and content.ndim == 3:
        content = dict(enumerate(content))
    table = content.get("layers", content) if isinstance(content, Mapping) else None
    found: dict[int, dict[str, Any]] = {}
    for key, entry in table.items() if isinstance(table, Mapping) else ():
        layer = _layer_number(key)
        if isinstance(entry, torch.Tensor):
            entry = {"rotation": entry}
        if layer is None or not isinstance(entry, Mapping):
            break
        if layer in found:
            raise RotationZooError(f"{path.name} has layer {layer} twice")
        if layer >= MOST_LAYERS:
            raise RotationZooError(
                f"{path.name} has a layer {layer}, and no model has", hint="do not use it"
            )
        said = _layer_number(entry.get("layer_id", layer))
        if said != layer:
            what = "no layer" if said is None else f"layer {said}"
            raise RotationZooError(
                f"{path.name}: the entry of layer {layer} says that it is {what}"
            )
        found[layer] = dict(entry)
    else:
        if found:
            return dict(sorted(found.items()))
    raise RotationZooError(
        f"{path.name} is no rotation file: it has no table of layers",
        hint="give a file that OSCAR's tools or rotationzoo export wrote",
    )


def _layer_number(name: Any) -> int | None:
    if isinstance(name, int):
        return name if 0 <= name < 10**9 else None
    number = re.fullmatch(r"(?:layers?[._])?(\d{1,9})", name) if isinstance(name, str) else None
    return int(number[1]) if number else None


def _version(table: Mapping[str, Any], side: Side) -> str:
    if "layers" not in table:
        return "tensors"
    return (
        "V3" if side.mean or table.get("format_version") == 3 else "V2" if side.per_head else "V1"
    )
