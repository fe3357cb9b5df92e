"""Reading the `.pt` files of OSCAR's servers, and the bare tables of tensors that vLLM reads.

The files are untrusted. Only tensors and primitives are unpickled, and no tensor is read before its
size is checked against that of the file.
"""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rotationzoo.engines.base import SideMatrices
from rotationzoo.engines.formats.reading import (
    as_mapping,
    check_layer,
    check_regular,
    check_tensor,
    objective_name,
    primitives,
)
from rotationzoo.engines.objectives import STATISTICS
from rotationzoo.engines.rotation_file import RotationFile
from rotationzoo.errors import RotationZooError
from rotationzoo.model.files import MOST_LAYERS

_SIDE_OF_STATISTIC = {"query": "key", "key": "key", "key_energy": "value", "value": "value"}
_SIDE_OF_WORD = {word: _SIDE_OF_STATISTIC[name] for word, name in STATISTICS.items()}
_SIDE_OF_OBJECTIVE = {"identity-k": "key", "identity-v": "value"}
_COMPANIONS = ("q_rotation", "o_rotation")  # the second matrices of non-orthogonal rotations
_TENSORS = ("rotation", "eigenvalues", "k_mean")
# How many bytes more than the file's size the tensors may take, since layers may share one stored
# matrix. It is enough for a Hadamard file of any model.
_MOST_SHARED = 1 << 28
_MOST_ENTRIES = (len(_TENSORS) + 1) * MOST_LAYERS
_LARGEST_PICKLE = 2 << 20  # bytes; 1,024 layers of three tensors each took 0.25 MB

_Entries = dict[int, dict[str, Any]]
"""Layer -> the file's entry for it."""


def read_pt(path: Path) -> RotationFile:
    """One side's file.

    Raises `RotationZooError` for anything but a rotation file, and for one whose entries contradict
    each other.
    """
    content = _load(path)
    table = as_mapping(content)
    tensors = _checked_tensors(path, table, _entries(path, content))
    objective = objective_name(table.get("objective"))
    matrices = SideMatrices(
        tensors["rotation"], objective, tensors["eigenvalues"], tensors["k_mean"]
    )
    side, version = _side(path, objective, table), _version(table, matrices)
    return RotationFile(path, version, side, matrices, primitives(table.get("calibration")))


def read_latent(path: Path, layer: int) -> SideMatrices:
    """One layer's rotation of latents (MLA): a bare matrix, or a table with its mean and
    eigenvalues beside it.

    Raises `RotationZooError` as `read_pt` does.
    """
    content = _load(path, layer)
    entries = _entries(path, content, layer)
    entry = entries[layer]
    rotation, second = entry.get("rotation"), entry.get("q_rotation")
    if _are_equal(rotation, second):
        del entry["q_rotation"]  # the inverse transposed of an orthogonal matrix is itself
    tensors = _checked_tensors(path, as_mapping(content), entries)
    means = {number: mean.flatten() for number, mean in tensors["k_mean"].items()}
    return SideMatrices(tensors["rotation"], "unknown", tensors["eigenvalues"], means)


def _checked_tensors(
    path: Path, table: Mapping[str, Any], entries: _Entries
) -> dict[str, dict[int, torch.Tensor]]:
    """The tensors of each name of `_TENSORS` by layer."""
    _check_orthogonal(path, table, entries)
    tensors = {name: _tensors(path, entries, name) for name in _TENSORS}
    for name, by_layer in tensors.items():
        for layer, tensor in by_layer.items():
            check_tensor(path, f"{name} of layer {layer}", tensor)
    if not tensors["rotation"]:
        raise RotationZooError(f"{path.name} is no rotation file: it has no rotation")
    return tensors


def _are_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.shape == other.shape and torch.allclose(one, other)


def _check_orthogonal(path: Path, table: Mapping[str, Any], entries: _Entries) -> None:
    """Raise `RotationZooError` for a file that declares non-orthogonal rotations.

    OSCAR's tools can also make pairs of a matrix and its inverse, and say so in the file.
    """
    declared = as_mapping(table.get("transform")).get("orthogonal") is not False
    companions = any(name in entry for entry in entries.values() for name in _COMPANIONS)
    if companions or not declared:
        raise RotationZooError(
            f"{path.name} holds rotations that are not orthogonal, with a second matrix for "
            "queries or outputs",
            hint="ask for orthogonal ones: 2-bit rows of one scale do not survive the others",
        )


def _tensors(path: Path, entries: _Entries, name: str) -> dict[int, torch.Tensor]:
    """Layer -> the tensor of this name, for all layers or for none.

    Raises `RotationZooError` if only some layers have one.
    """
    tensors = {
        layer: entry[name]
        for layer, entry in entries.items()
        if isinstance(entry.get(name), torch.Tensor)
    }
    if tensors and (without := sorted(entries.keys() - tensors.keys())):
        raise RotationZooError(
            f"{path.name} has no {name} for layer {without[0]}, and has for others"
        )
    return tensors


def _side(path: Path, objective: str, table: Mapping[str, Any]) -> str | None:
    """`key` or `value`, from the file's name and its content, or None if neither says which.

    Raises `RotationZooError` if the two differ.
    """
    stated = _stated_side(objective, as_mapping(table.get("transform")))
    if not re.match(r"[kv](_|$)", path.stem):
        return stated
    named = "key" if path.stem.startswith("k") else "value"
    if stated and named != stated:
        raise RotationZooError(
            f"{path.name} is named as {named}s and says that it holds {stated}s "
            f"(objective {objective}): they are swapped",
            hint="do not use it, or give the files their right names",
        )
    return named


def _stated_side(objective: str, transform: Mapping[str, Any]) -> str | None:
    if objective.startswith("oscar2_v_"):
        return "value"
    if objective.startswith("optr_output_aware_"):
        return "key" if objective.endswith("_k") else "value"
    if side := _SIDE_OF_WORD.get(objective.split("_")[0]) or _SIDE_OF_OBJECTIVE.get(objective):
        return side
    return next((side for side in ("key", "value") if side in transform), None)


def _load(path: Path, layer: int | None = None) -> Any:
    """The content of a file, of one layer alone if it is given.

    Its tensors are first loaded on `meta`, without data, to check their sizes: a file of a few
    bytes can ask for terabytes.
    """
    check_regular(path)
    try:
        _check_archive(path)
        _check_sizes(path, torch.load(path, map_location="meta", weights_only=True), layer)
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


def _check_archive(path: Path) -> None:
    """Raise `RotationZooError` for a compressed archive, which may unpack to any size, and for one
    of more tensors than the layers of any model have. torch itself never compresses.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    pickled = sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
    # Layers may share a stored tensor, and then only the pickle tells how many there are.
    if len(entries) > _MOST_ENTRIES or pickled > _LARGEST_PICKLE:
        raise RotationZooError(
            f"{path.name} is no rotation file: it holds more tensors than any model has layers for",
            hint="do not use it",
        )
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > (size := path.stat().st_size):
        raise RotationZooError(
            f"{path.name} is no rotation file: it unpacks to {unpacked:,} bytes and has {size:,}",
            hint="do not use it",
        )


def _check_sizes(path: Path, content: Any, layer: int | None) -> None:
    """Raise `RotationZooError` if the tensors on `meta` need more bytes than the file can hold."""
    size, total = path.stat().st_size, 0
    entries = _entries(path, content, layer).values()
    for tensor in (entry.get(name) for entry in entries for name in _TENSORS):
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            continue
        expanded = tensor.numel() * tensor.itemsize
        total += expanded
        # A view can be larger than its storage, by expanding, or smaller, as a slice.
        largest = max(expanded, tensor.untyped_storage().nbytes())
        if largest > size or total > size + _MOST_SHARED:
            raise RotationZooError(
                f"{path.name} is no rotation file: its tensors ask for {total:,} bytes and it has "
                f"{size:,}",
                hint="do not use it",
            )


def _entries(path: Path, content: Any, layer: int | None = None) -> _Entries:
    """The entries of all layers.

    They come from a table of layers, a bare table of tensors, or one tensor that stacks all layers.
    With a `layer`, the file holds this layer's matrix or entry alone.
    """
    if layer is not None:
        if isinstance(content, Mapping) and "mean" in content:
            content = {**content, "k_mean": content["mean"]}
        content = {layer: content}
    if isinstance(content, torch.Tensor) and content.ndim == 3:
        content = dict(enumerate(content))
    table = as_mapping(as_mapping(content).get("layers", content))
    entries: _Entries = {}
    for name, entry in table.items():
        layer = _layer_number(name)
        if isinstance(entry, torch.Tensor):
            entry = {"rotation": entry}
        if layer is None or not isinstance(entry, Mapping):
            # One entry that is no layer means that this is no table of layers.
            entries = {}
            break
        if layer in entries:
            raise RotationZooError(f"{path.name} has layer {layer} twice")
        check_layer(path, layer)
        _check_layer_id(path, layer, entry)
        entries[layer] = dict(entry)
    if not entries:
        raise RotationZooError(
            f"{path.name} is no rotation file: it has no table of layers",
            hint="give a file that OSCAR's tools or rotationzoo export wrote",
        )
    return dict(sorted(entries.items()))


def _check_layer_id(path: Path, layer: int, entry: Mapping[str, Any]) -> None:
    stated = _layer_number(entry.get("layer_id", layer))
    if stated == layer:
        return
    claim = "no layer" if stated is None else f"layer {stated}"
    raise RotationZooError(f"{path.name}: the entry of layer {layer} says that it is {claim}")


def _layer_number(name: Any) -> int | None:
    if isinstance(name, int):
        return name if 0 <= name < 10**9 else None
    number = re.fullmatch(r"(?:layers?[._])?(\d{1,9})", name) if isinstance(name, str) else None
    return int(number[1]) if number else None


def _version(table: Mapping[str, Any], matrices: SideMatrices) -> str:
    if "layers" not in table:
        return "tensors"
    if matrices.mean or table.get("format_version") == 3:
        return "V3"
    return "V2" if matrices.per_head else "V1"
