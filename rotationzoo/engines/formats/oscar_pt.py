"""Writes and reads the `.pt` files of OSCAR's servers; also reads vLLM's bare tables of tensors.

Version 1 has one matrix per layer, version 2 one per KV head, and version 3 adds a key mean. A file
is `{format_version, objective, source_grouping, layers: {id: {layer_id, rotation, eigenvalues}}}`.
It holds only plain tensors and primitives, so that it loads with `weights_only=True`. Latents have
a folder with one file per layer.

Files of others are untrusted: only tensors and primitives are unpickled, after a check of sizes.
"""

import io
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.reductions import Settled
from rotationzoo.engines.base import Payload, RotationFile, SideMatrices, is_text, objective_name
from rotationzoo.errors import RotationZooError
from rotationzoo.model.files import MOST_LAYERS
from rotationzoo.sides import LATENT, SIDES
from rotationzoo.storage import folders
from rotationzoo.storage.files import check_regular

_CALIBRATED = r"(qqt|ktk|sst|vtv)_|oscar2_|cov_eig_"


def write_pair(
    work: Path, final: Path, payload: Payload, request: Settled, prefix: str
) -> dict[str, str]:
    """Write both sides to `work`. Returns the server's variables, whose names begin with `prefix`:
    the paths of the two files in `final`, and the clip ratios. With a key mean both sides have
    version 3; otherwise each has the lowest version that fits."""
    paths, clips = {}, {}
    for letter, side, clip in zip("kv", (payload.key, payload.value), request.clip, strict=True):
        version = 3 if payload.key.mean or side.mean else 1 + side.per_head
        # Both files of a run with a key mean share one name.
        name = _file_name(letter, payload.key if payload.key.mean else side)
        write_pt(work / name, _content(letter, side, payload.provenance, version))
        paths[f"{prefix}_{letter.upper()}_ROTATION_PATH"] = str(final / name)
        # No clipping is 1 in this package and 0 in the servers.
        clips[f"{prefix}_{letter.upper()}_CLIP_RATIO"] = f"{0 if clip == 1 else clip:g}"
    return paths | clips


def _file_name(letter: str, side: SideMatrices) -> str:
    """The default name of a file by its content. `letter` is `k` or `v`."""
    name = side.objective
    calibrated = re.match(_CALIBRATED, name)
    if side.mean:
        name = "oscar2_center" if calibrated else f"{name}_center"
    elif side.per_head:
        name = "perhead" if calibrated else f"{name}_perhead"
    return f"{letter}_rotation_{name}.pt"


def _content(
    letter: str, side: SideMatrices, provenance: Mapping[str, Any], version: int
) -> dict[str, Any]:
    """The file of keys (`letter` is `k`) or of values (`v`), in OSCAR's order."""
    transform, centered = {"key": "center"}, "oscar2_center"
    if letter == "v":
        transform, centered = {"value": "pre_wo"}, "oscar2_v_pre_wo"
    content: dict[str, Any] = {"format_version": version, "objective": side.objective}
    content["source_grouping"] = "head" if version == 3 and side.per_head else "layer"
    if version == 2:
        content["objective"] = f"{side.objective.removesuffix('_perhead')}_perhead"
        content["source_grouping"] = "per_kv_head"
    if version == 3:
        plain = f"{side.objective}_center"
        content["objective"] = centered if re.match(_CALIBRATED, plain) else plain
        content["transform"] = {**transform, "centered": bool(side.mean), "orthogonal": True}
    if provenance:
        content["calibration"] = dict(provenance)
    layers: dict[int, dict[str, Any]]
    layers = content["layers"] = {layer: {"layer_id": layer} for layer in sorted(side.rotation)}
    for stored, field in _TENSORS.items():
        for layer, tensor in getattr(side, field).items():
            layers[layer][stored] = tensor.float().contiguous()
    return content


def write_pt(path: Path, content: Any) -> None:
    """Write a new `.pt` file. Raises `OSError` for a full disk, which torch's writer does not."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    folders.write_new(path, buffer.getvalue())


# Objectives that tell the side of a file. `_OF_KEYS` wins where both match.
_OF_KEYS = re.compile(r"(qqt|ktk)(_|$)|identity-k$|optr_output_aware_(.*_)?k$")
_OF_VALUES = re.compile(r"(sst|vtv)(_|$)|identity-v$|optr_output_aware_|oscar2_v_")
_COMPANIONS = ("q_rotation", "o_rotation")  # the second matrices of non-orthogonal rotations
_TENSORS = {"rotation": "rotation", "eigenvalues": "eigenvalues", "k_mean": "mean"}  # as in files
_MOST_SHARED = 1 << 28  # bytes above the file's size: layers may share a tensor, as with Hadamard
_MOST_ENTRIES = (len(_TENSORS) + 1) * MOST_LAYERS
_LARGEST_PICKLE = 2 << 20  # bytes; 1,024 layers of three tensors each took 0.25 MB
_OF_A_LAYER = re.compile(r"layer_\d{1,9}\.pt")
_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Entries = dict[int, dict[str, Any]]  # layer -> the file's entry for it


def read_pt(path: Path) -> RotationFile:
    """One side's file. Raises `RotationZooError` for other files and for contradictions."""
    table, entries = _load(path)
    objective = objective_name(table.get("objective"))
    content = SideMatrices(objective=objective, **_tensors_of(path, entries))
    version = "V2" if content.per_head else "V1"
    if content.mean or table.get("format_version") == 3:
        version = "V3"
    if "layers" not in table:
        version = "tensors"
    side = _side(path, objective, _as_mapping(table.get("transform")))
    calibration = _primitives(table.get("calibration"))
    return RotationFile(path, version, side, content, calibration)


def latent_files(folder: Path) -> list[Path]:
    """The files of a folder of latents: matrices, or tables with a mean and eigenvalues."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(each for each in files if _OF_A_LAYER.fullmatch(each.name))


def read_latents(folder: Path) -> RotationFile:
    """The rotations of latents in a folder. Raises `RotationZooError` as `read_pt` does."""
    entries: Entries = {}
    folder = folder.resolve()
    for path in latent_files(folder):
        layer = _check_layer(path, path.stem.removeprefix("layer_"))
        if layer in entries:
            raise RotationZooError(f"{folder.name} has layer {layer} twice")
        entries |= _load(path, layer)[1]
    tensors = _tensors_of(folder, entries)
    tensors["mean"] = {layer: mean.flatten() for layer, mean in tensors["mean"].items()}
    content = SideMatrices(objective=folder.name, **tensors)
    return RotationFile(folder, "latents", LATENT, content)


def _load(path: Path, layer: int | None = None) -> tuple[Mapping[str, Any], Entries]:
    """A file's table and its entries by layer. With a `layer`, the file holds only that one. Sizes
    are checked on `meta` first: a file of a few bytes can ask for terabytes."""
    check_regular(path)
    try:
        _check_archive(path)
        on_meta = torch.load(path, map_location="meta", weights_only=True)
        _check_sizes(path, _entries(path, on_meta, layer))
        content = torch.load(path, map_location="cpu", weights_only=True)
        table, entries = _as_mapping(content), _entries(path, content, layer)
        of_latents = entries.get(layer, {}) if layer is not None else {}
        match of_latents:  # an orthogonal matrix is its own inverse transpose
            case {"rotation": torch.Tensor() as one, "q_rotation": torch.Tensor() as other}:
                if one.shape == other.shape and torch.allclose(one, other):
                    del of_latents["q_rotation"]
    except RotationZooError:
        raise
    except Exception as error:  # pickle and zip files fail in many ways
        reason = "it cannot be opened as plain tensors with layers"
        hint = "do not use it; a file that runs code when it is opened is refused"
        raise _no_rotations(path, reason, hint) from error
    # OSCAR's tools can also make pairs of a matrix and its inverse; the file says so.
    declared = _as_mapping(table.get("transform")).get("orthogonal") is not False
    if not declared or any(name in entry for entry in entries.values() for name in _COMPANIONS):
        pairs = "rotations that are not orthogonal, with a second matrix for queries or outputs"
        hint = "ask for orthogonal ones: 2-bit rows of one scale do not survive the others"
        raise RotationZooError(f"{path.name} holds {pairs}", hint)
    return table, entries


def _check_archive(path: Path) -> None:
    """Raise `RotationZooError` for a compressed archive or too many tensors."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    unpacked, size = sum(entry.file_size for entry in entries), path.stat().st_size
    pickled = sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
    # Layers may share a stored tensor, and then only the pickle tells how many there are.
    if len(entries) > _MOST_ENTRIES or pickled > _LARGEST_PICKLE:
        raise _no_rotations(path, "it holds more tensors than any model has layers for")
    if unpacked > size:
        raise _no_rotations(path, f"it unpacks to {unpacked:,} bytes and has {size:,}")


def _no_rotations(path: Path, reason: str, hint: str = "do not use it") -> RotationZooError:
    return RotationZooError(f"{path.name} is not a rotation file: {reason}", hint)


def _check_sizes(path: Path, entries: Entries) -> None:
    """Raise `RotationZooError` if the tensors on `meta` need more bytes than the file has."""
    size, total = path.stat().st_size, 0
    for tensor in (entry.get(name) for entry in entries.values() for name in _TENSORS):
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            continue
        total += (expanded := tensor.numel() * tensor.itemsize)
        # A view can be larger than its storage, by expanding, or smaller, as a slice.
        largest = max(expanded, tensor.untyped_storage().nbytes())
        if largest > size or total > size + _MOST_SHARED:
            raise _no_rotations(path, f"its tensors ask for {total:,} bytes and it has {size:,}")


def _entries(path: Path, content: Any, layer: int | None) -> Entries:
    """The entries by layer, from a table of layers or of tensors, or from one stacked tensor."""
    if layer is not None:  # alone in its file, and its mean may have another name
        content = {layer: content}
        if "mean" in _as_mapping(content[layer]):
            content[layer] = {**content[layer], "k_mean": content[layer]["mean"]}
    if isinstance(content, torch.Tensor) and content.ndim == 3:
        content = dict(enumerate(content))
    table = _as_mapping(_as_mapping(content).get("layers", content))
    entries: Entries = {}
    for name, entry in table.items():
        number = _layer_number(name)
        if isinstance(entry, torch.Tensor):
            entry = {"rotation": entry}
        if number is None or not isinstance(entry, Mapping):
            # One entry that is no layer means that this is no table of layers.
            entries = {}
            break
        if number in entries:
            raise RotationZooError(f"{path.name} has layer {number} twice")
        stated = _layer_number(entry.get("layer_id", number))
        if stated != _check_layer(path, number):
            says = "is no layer" if stated is None else f"is layer {stated}"
            raise RotationZooError(f"{path.name}: the entry of layer {number} says that it {says}")
        entries[number] = dict(entry)
    if not entries:
        hint = "give a file that OSCAR's tools or rotationzoo export wrote"
        raise _no_rotations(path, "it has no table of layers", hint)
    return dict(sorted(entries.items()))


def _layer_number(name: Any) -> int | None:
    number = re.fullmatch(r"(?:layers?[._])?(\d{1,9})", str(name))
    return int(number[1]) if number and isinstance(name, int | str) else None


def _tensors_of(path: Path, entries: Entries) -> dict[str, dict[int, torch.Tensor]]:
    """The tensors of each name by layer, real and not empty: for all layers or for none."""
    tables = {}
    for stored, name in _TENSORS.items():
        found = {layer: entry.get(stored) for layer, entry in entries.items()}
        tables[name] = {i: each for i, each in found.items() if isinstance(each, torch.Tensor)}
        if tables[name] and (without := sorted(found.keys() - tables[name].keys())):
            problem = f"{path.name} has no {name} for layer {without[0]}, and has for others"
            raise RotationZooError(problem)
        for layer, tensor in tables[name].items():
            plain = tensor.layout == torch.strided and tensor.dtype in _REAL
            if not plain or not tensor.ndim or not tensor.numel():
                label = f"the {name} of layer {layer} in {path.name}"
                raise RotationZooError(f"{label} is not a table of real numbers", "do not use it")
    if not tables["rotation"]:
        raise _no_rotations(path, "it has no rotation")
    return tables


def _as_mapping(content: Any) -> Mapping[str, Any]:
    """The content if it is a table, or else an empty one: untrusted files may hold anything."""
    return content if isinstance(content, Mapping) else {}


def _primitives(content: Any) -> dict[str, str | int | float]:
    """The entries that a manifest can hold: printable text, finite numbers, booleans."""
    entries = {}
    for name, value in _as_mapping(content).items():
        is_number = isinstance(value, int | float) and abs(value) < 2**63 and math.isfinite(value)
        if is_text(name) and (is_number or is_text(value)):
            entries[name] = value
    return entries


def _check_layer(path: Path, layer: int | str) -> int:
    """The layer's number. Raises `RotationZooError` if no model has so many layers."""
    if int(layer) >= MOST_LAYERS:
        problem = f"{path.name} has a layer {layer}, and no model has that many"
        raise RotationZooError(problem, "do not use it")
    return int(layer)


def _side(path: Path, objective: str, transform: Mapping[str, Any]) -> str | None:
    """`key` or `value`, by name and content. Raises `RotationZooError` if these differ."""
    stated = next((side for side in SIDES if side in transform), None)
    if _OF_VALUES.match(objective):
        stated = "value"
    if _OF_KEYS.match(objective):
        stated = "key"
    named = {"k": "key", "v": "value"}.get(path.stem.partition("_")[0])
    if stated and named and named != stated:
        says = f"says that it holds {stated}s (objective {objective}): they are swapped"
        hint = "do not use it, or give the files their right names"
        raise RotationZooError(f"{path.name} is named as {named}s and {says}", hint)
    return named or stated
