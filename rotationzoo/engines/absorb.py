"""Writing a copy of a model whose weights rotate its values, which then costs nothing to serve. One
tensor is in memory at a time."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.tensor_check import DTYPES
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import cached_rows, same_shapes
from rotationzoo.linalg.orthogonality import invert
from rotationzoo.model import loading
from rotationzoo.model.absorbed import RECORD, read_record, record_text
from rotationzoo.model.files import Stored, entry_file, is_gguf, read_headers, weight_files
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.quantized import quantization_of
from rotationzoo.model.source import Source, fetch, fetch_weights, find, weights_fingerprint
from rotationzoo.model.value_projections import SERVE_UNABSORBED, find_projections
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe.rope import same_scaling, scaling_of
from rotationzoo.sides import HEADS
from rotationzoo.storage.disks import disk_errors
from rotationzoo.storage.folders import install, temporary_sibling

_DTYPES = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}
# Endings of weight files. Only the model's own safetensors files are copied, with the changes; any
# others would lack them, so they are left out.
_ENDINGS = ".safetensors .bin .pt .pth .ckpt .gguf .h5 .msgpack .onnx .index.json"
_ELSEWHERE = "choose another place with --output"


def absorb(artifact: Artifact, model: str, output: Path, progress: Progress = silent) -> Path:
    """Write a copy of a model whose cache holds `v @ R` to a new folder, and return the folder.

    Raises `RotationZooError` before anything is written if the artifact is damaged or made for
    another model, the output exists, the weights are quantized or changed already, or
    (`UnsupportedModel`) a layer cannot absorb a rotation.
    """
    if output.exists():
        raise RotationZooError(f"{output} is there already", _ELSEWHERE)
    if (cached := cached_rows(artifact.geometry)) is not HEADS:
        raise UnsupportedModel(
            f"a rotation of {cached.words} is not absorbed into weights", hint=SERVE_UNABSORBED
        )
    progress("looking at the model", 0, 0)
    made_for, calibrate = artifact.manifest.model, f"make one with: rotationzoo calibrate {model}"
    # The artifact's revision applies only to the hub id that it was made for.
    is_hub_id = made_for.id == model and not Path(model).is_dir()
    source = find(model, made_for.revision if is_hub_id else None)
    fetch(source, weights=False)
    if read_record(source.folder):
        carried = f"the weights of {model} carry the value rotation of an artifact already"
        raise RotationZooError(f"{carried}, says its {RECORD}", hint="give the model before that")
    config = loading.load_config(source)
    if quantization_of(config) is not None or is_gguf(source.folder):
        raise UnsupportedModel(
            f"the weights of {model} are quantized in blocks, which cannot carry a rotation",
            hint="absorb into the weights that it was quantized from, and quantize those",
        )
    _check_scaling(artifact, config, model)
    if problems := verify(artifact, model, source.revision).problems:
        raise RotationZooError(f"{artifact.folder} does not fit {model}: {problems[0]}", calibrate)
    changes = _find_changes(artifact, loading.on_meta(config, model), model)
    fetch_weights(source, progress)
    # For a model from the hub, `verify` had no weights yet to compare fingerprints with.
    if made_for.weights_fingerprint not in (None, weights_fingerprint(source)):
        raise RotationZooError(
            f"{artifact.folder} was made for other weights than {model} has", hint=calibrate
        )
    _write_copy(artifact, source, changes, output, progress)
    return output


def _check_scaling(artifact: Artifact, config: PretrainedConfig, model: str) -> None:
    """Raise `RotationZooError` for an artifact that was calibrated with scaled RoPE, unless the
    config scales it so: whoever serves the copy would know nothing of the scaling."""
    wanted = artifact.recipe.rope_scaling
    if not same_scaling(wanted, scaling_of(config)):
        raise RotationZooError(
            f"{artifact.folder} was calibrated with the rope scaling {wanted}, and a copy of "
            f"{model} would run without it, because it gets the model's own config",
            hint="put the scaling into config.json of a folder of the model, and calibrate that "
            "without --rope-scaling",
        )


# ---- the changes of parameters


@dataclass(frozen=True)
class _Change:
    """The change of one parameter."""

    shape: torch.Size
    transform: Callable[[torch.Tensor], torch.Tensor]
    """Takes the parameter in float64, and returns it changed, in the same shape."""


_Changes = dict[str, _Change]
"""Parameter name -> its change."""


def _find_changes(artifact: Artifact, model: PreTrainedModel, name: str) -> _Changes:
    """The changes after which a model on `meta` computes values that are rotated already.

    Raises `UnsupportedModel` if its geometry is not the artifact's, or if a layer cannot absorb a
    rotation.
    """
    geometry = geometry_on_meta(model)
    if geometry is None or not same_shapes(geometry, artifact.geometry):
        raise UnsupportedModel(
            f"what the layers of {name} do cannot be checked without its weights",
            hint=SERVE_UNABSORBED,
        )
    changes: _Changes = {}
    projections = find_projections(model, geometry, name)
    for layer, (value, output) in zip(geometry, projections, strict=True):
        matrix = artifact.rotations[layer.index].value.matrix.double()
        matrix = matrix.expand(layer.kv_heads, -1, -1)
        for part, tensor in model.get_submodule(value).named_parameters():  # weight and bias
            changes[f"{value}.{part}"] = _Change(tensor.shape, partial(_multiply_rows, matrix))
        shape = model.get_parameter(f"{output}.weight").shape
        # The output projection has a block of columns per query head. With GQA, the query heads of
        # a group all undo the matrix of the same KV head.
        inverse = invert(matrix).repeat_interleave(layer.group, 0)
        changes[f"{output}.weight"] = _Change(shape, partial(_multiply_columns, inverse))
    return changes


def _multiply_rows(matrix: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Multiply what a projection computes for each head, by a weight `[H D, in]` or a bias `[H D]`:
    rows `x` become `x @ matrix`, float64 `[H, D, D]`."""
    of_heads = tensor.unflatten(0, matrix.shape[:2])
    return torch.einsum("hij,hi...->hj...", matrix, of_heads).flatten(0, 1)


def _multiply_columns(matrix: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Multiply what a projection reads of each head, by a weight `[out, H D]`: `x @ weight^T`
    becomes `x @ matrix @ weight^T`, with a matrix float64 `[H, D, D]`."""
    return _multiply_rows(matrix.mT, tensor.mT).mT


# ---- the copy


def _find_places(source: Source, changes: _Changes) -> dict[str, Stored]:
    """The place of each parameter.

    Raises `RotationZooError` if a parameter does not have exactly one tensor, in floating point and
    of its shape.
    """
    entries = read_headers(weight_files(source.folder))
    places = {}
    for parameter, change in changes.items():
        entry = _entry_of(parameter, entries)
        shape = list(change.shape)
        if entry is None or entry.shape != shape or entry.dtype not in _DTYPES:
            raise RotationZooError(
                f"the weights of {source.name} have no {parameter} of shape {shape} in floating "
                "point",
                hint="write them again with transformers' save_pretrained, and give that folder",
            )
        places[parameter] = entry
    return places


def _entry_of(parameter: str, entries: Mapping[str, Stored]) -> Stored | None:
    """The entry of the one tensor that is this parameter; None if none or several match.

    In the checkpoints of vision models, names may have another prefix, often made of the same words
    in another order.
    """
    if parameter in entries:
        return entries[parameter]
    # Compare names from `layers.` on, since only what comes before it may differ.
    ending = "." + parameter[max(parameter.rfind("layers."), 0) :]
    names = [name for name in entries if f".{name}".endswith(ending)]
    words = sorted(parameter.split("."))
    names = [name for name in names if sorted(name.split(".")) == words] or names
    return entries[names[0]] if len(names) == 1 else None


def _read_tensor(place: Stored) -> torch.Tensor:
    """A tensor of a file, in float64."""
    with place.file.open("rb") as file:
        file.seek(place.begin)
        data = bytearray(file.read(place.end - place.begin))
    return torch.frombuffer(data, dtype=_DTYPES[place.dtype]).view(place.shape).double()


def _write_copy(
    artifact: Artifact, source: Source, changes: _Changes, output: Path, progress: Progress
) -> None:
    """Copy a model to the folder `output`, with its parameters changed, in float64 and rounded
    once, and a record of that.

    Raises `RotationZooError` if there is such a folder by now, or the checkpoint lacks a parameter.
    """
    places = _find_places(source, changes)
    files = sorted({*_files_beside_weights(source.folder), *weight_files(source.folder)})
    with disk_errors(output), temporary_sibling(output) as work:
        # Check again under the lock: fetching the weights took time.
        if output.exists():
            raise RotationZooError(f"{output} is there by now", hint=_ELSEWHERE)
        for done, path in enumerate(files):
            progress("absorbing", done, len(files))
            copy = work / path.name
            shutil.copyfile(path, copy)
            for name in [name for name, place in places.items() if place.file == path]:
                place = places[name]
                result = changes[name].transform(_read_tensor(place))
                with copy.open("r+b") as file:
                    file.seek(place.begin)
                    rounded = result.to(_DTYPES[place.dtype]).contiguous()
                    file.write(rounded.view(torch.uint8).numpy().data)
            copy.chmod(0o644)  # as for exports: the server may run as another user
        record = record_text(artifact, source, Source(source.name, work, None))
        (work / RECORD).write_bytes(record)
        install(work, output)


def _files_beside_weights(folder: Path) -> list[Path]:
    """The files that are copied unchanged.

    Raises `RotationZooError` for a symbolic link that leads out of the folder: copies are
    published, and the link's target may be private. Links into the blobs of the hub's cache, which
    is made of links, are allowed.
    """
    blobs = folder.parent.parent / "blobs"
    allowed = [os.path.realpath(folder)]
    if not blobs.is_symlink():
        allowed.append(os.path.realpath(blobs))
    own = entry_file(weight_files(folder))
    weights = tuple(_ENDINGS.split())
    paths = [
        each for each in folder.iterdir() if not each.name.endswith(weights) or each.name == own
    ]
    for path in paths:
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in allowed):
            hint = "remove it, or put the file itself there"
            raise RotationZooError(f"{path} leads out of its folder by a symbolic link", hint)
    return [path for path in paths if path.is_file()]
