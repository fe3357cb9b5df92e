"""Absorbing the value rotation into a model's weights, so that it costs nothing to serve."""

import os
import shutil
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.engines.absorbed import RECORD, record_text
from rotationzoo.engines.weight_edits import Change, apply_change, find_places
from rotationzoo.errors import RotationZooError, UnsupportedModel, as_unavailable
from rotationzoo.model import loading
from rotationzoo.model.files import weight_files
from rotationzoo.model.geometry import geometry_on_meta, same_shapes
from rotationzoo.model.source import Source, fetch, find, weights_fingerprint
from rotationzoo.model.value_projections import SERVE_UNABSORBED, find_projections
from rotationzoo.progress import Progress, silent
from rotationzoo.storage.files import disk_errors
from rotationzoo.storage.folders import install, temporary_sibling

_INDEX = "model.safetensors.index.json"
# Endings of weight files. Only the model's own safetensors files are copied with the rotation; any
# others would lack it, so they are left out.
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)


def absorb(artifact: Artifact, model: str, output: Path, progress: Progress = silent) -> Path:
    """Write a copy of a model whose cache holds `v @ R` to a new folder, and return the folder.

    Holds only one tensor in memory at a time. Raises `RotationZooError` before anything is written
    if the artifact is damaged or made for another model, the output exists, the weights are
    quantized or already rotated, or (`UnsupportedModel`) a layer cannot absorb a rotation.
    """
    if output.exists():
        raise RotationZooError(
            f"{output} is there already", hint="choose another place with --output"
        )
    progress("looking at the model", 0, 0)
    made_for, calibrate = artifact.manifest.model, f"make one with: rotationzoo calibrate {model}"
    # The artifact's revision applies only to the hub id that it was made for.
    source = find(model, made_for.revision if made_for.id == model else None)
    fetch(source, weights=False)
    if (source.folder / RECORD).is_file():
        raise RotationZooError(
            f"{model} has absorbed a rotation already, says its {RECORD}",
            hint="give the model before that",
        )
    config = loading.load_config(source)
    _check_not_quantized(config, model)
    if problems := verify(artifact, model, source.revision).problems:
        raise RotationZooError(
            f"{artifact.folder} does not fit {model}: {problems[0]}", hint=calibrate
        )
    changes = _changes(artifact, loading.on_meta(config, model), model)
    progress("fetching the weights", 0, 0)
    fetch(source)
    # For a model from the hub, `verify` had no weights yet to compare fingerprints with.
    if made_for.weights_fingerprint not in (None, weights_fingerprint(source)):
        raise RotationZooError(
            f"{artifact.folder} was made for other weights than those of {model}", hint=calibrate
        )
    _write_copy(artifact, source, changes, output, progress)
    return output


def _check_not_quantized(config: PretrainedConfig, model: str) -> None:
    # The config of a multimodal model may keep the entry in its text part.
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None):
            raise UnsupportedModel(
                f"the weights of {model} are quantized in blocks, which cannot carry a rotation",
                hint="absorb into the weights that it was quantized from, and quantize those",
            )


def _changes(artifact: Artifact, model: PreTrainedModel, name: str) -> dict[str, Change]:
    """Parameter name -> its change, found on the model on `meta`."""
    with as_unavailable(f"{name} fails when it runs"):
        geometry = geometry_on_meta(model)
    if geometry is None or not same_shapes(geometry, artifact.geometry):
        raise UnsupportedModel(
            f"what the layers of {name} do cannot be checked without its weights",
            hint=SERVE_UNABSORBED,
        )
    changes: dict[str, Change] = {}
    projections = find_projections(model, geometry, name)
    for layer, (value, output) in zip(geometry, projections, strict=True):
        matrix = artifact.rotations[layer.index].value.matrix.double()
        # A pooled rotation `[1, D, D]` serves all KV heads.
        rotation = matrix.expand(layer.kv_heads, -1, -1)
        for part, tensor in model.get_submodule(value).named_parameters():  # weight and bias
            changes[f"{value}.{part}"] = Change(tensor.shape, rotation, columns=False)
        shape = model.get_parameter(f"{output}.weight").shape
        # The output projection has a block of columns per query head. With GQA, the query heads of
        # a group all undo the rotation of the same KV head.
        of_query_heads = rotation.repeat_interleave(layer.group, 0)
        changes[f"{output}.weight"] = Change(shape, of_query_heads, columns=True)
    return changes


def _write_copy(
    artifact: Artifact,
    source: Source,
    changes: dict[str, Change],
    output: Path,
    progress: Progress,
) -> None:
    places = find_places(source, changes)
    files = [*_files_beside_weights(source.folder), *weight_files(source.folder)]
    with disk_errors(output), temporary_sibling(output) as work:
        # Check again under the lock: fetching the weights took time.
        if output.exists():
            raise RotationZooError(
                f"{output} is there by now", hint="choose another place with --output"
            )
        for done, path in enumerate(files):
            progress("absorbing", done, len(files))
            copy = work / path.name
            shutil.copyfile(path, copy)
            for name, place in places.items():
                if place.file == path:
                    apply_change(copy, place, changes[name])
            copy.chmod(0o644)  # as for exports: the server may run as another user
        (work / RECORD).write_text(record_text(artifact), encoding="utf-8")
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
    paths = [
        path for path in folder.iterdir() if path.name == _INDEX or not path.name.endswith(_WEIGHTS)
    ]
    for path in paths:
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in allowed):
            raise RotationZooError(
                f"{path} leads out of its folder by a symbolic link",
                hint="remove it, or put the file itself there",
            )
    return [path for path in paths if path.is_file()]
