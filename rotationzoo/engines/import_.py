"""Imports other tools' rotation files as an artifact."""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.manifest import hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.checkpoint import finished_artifact
from rotationzoo.calibration.soundness import write_sound_artifact
from rotationzoo.engines.base import RotationFile, check_matrices, data_free_name
from rotationzoo.engines.formats.oscar_pt import latent_files, read_latents, read_pt
from rotationzoo.errors import RotationZooError, UnsupportedModel, as_refusal
from rotationzoo.geometry import (
    Geometry,
    cached_layers,
    check_group_size,
    geometry_json,
    head_dims,
    shift_reason,
    shifted_layers,
)
from rotationzoo.linalg.composition_table import DATA_FREE, GIVEN
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.source import Source, find, has_weights, weights_fingerprint
from rotationzoo.recipe import Recipe, name_of
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import LayerRotations, Rotation, Rotations
from rotationzoo.settings import Import
from rotationzoo.sides import LATENT, SIDES
from rotationzoo.storage.files import digest, sha256
from rotationzoo.storage.folders import check_writable
from rotationzoo.writer import check_replaceable, library_versions

Files = dict[str, RotationFile]  # side -> its file: `key` and `value`, or `latent`
_NAME = re.compile(r"[kv]_(rotation|perhead)\w*\.pt")  # the default names of files
_SHARED = ("generation_id", "config_sha256", "model")  # `calibration` of both files of a run
_FETCH_AGAIN = "fetch both again"
_CHECK = "check the model"


def gather_files(files: Sequence[Path]) -> Files:
    """Read a pair of files, a folder with one pair, or a folder of latents. Raises
    `RotationZooError` for a side that is missing, unknown or damaged, and for a mixed pair."""
    paths = [path.expanduser() for path in files]
    if len(paths) == 1 and latent_files(paths[0]):
        latents = read_latents(paths[0])
        check_matrices(latents)
        return {LATENT: latents}
    if len(paths) == 1 and paths[0].is_dir():
        paths = _pair_in(paths[0])
    pair = _pair_of(map(read_pt, paths))
    for problem, hint in _problems(**pair):
        raise RotationZooError(problem, hint)
    return pair


def _pair_of(files: Iterable[RotationFile]) -> Files:
    sides: Files = {}
    for file in files:
        if file.side is None:
            unknown = f"nothing says whether {file.path.name} holds keys or values"
            raise RotationZooError(unknown, hint="rename it to start with k_ or v_")
        if file.side in sides:
            first = sides[file.side].path.name
            raise RotationZooError(f"{first} and {file.path.name} both hold {file.side}s")
        sides[file.side] = file
    for side in SIDES:
        if side not in sides:
            hint = "give both files: keys and values have different rotations"
            raise RotationZooError(f"there is no file for the {side}s", hint)
    return {side: sides[side] for side in SIDES}


def _pair_in(folder: Path) -> list[Path]:
    """The key file and the value file in a folder. Raises `RotationZooError` for several pairs."""
    names = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name))
    letters = [name[0] for name in names]
    if letters == ["k", "v"]:
        return [folder / name for name in names]
    if len(letters) > len(set(letters)):
        raise RotationZooError(
            f"{folder} holds several pairs: {', '.join(names)}", "name two files"
        )
    only = f", only {names[0]}" if names else ""
    hint = "give the two files, such as k_rotation_qqt_r_h_pbr.pt and v_rotation_sst_r_h_pbr.pt"
    raise RotationZooError(f"{folder} holds no pair of rotation files{only}", hint)


def _problems(key: RotationFile, value: RotationFile) -> Iterator[tuple[str, str]]:
    """What is wrong with a pair, each with a hint."""
    # SGLang's own calibration replaces the files one by one, and marks the folder meanwhile.
    for pending in key.path.parent.glob(".oscar_*.pending.json"):
        written = "a pair that is being written, or was left half-written"
        finish = "let the server that writes it finish, or remove that file"
        yield f"{pending.parent} holds {written} ({pending.name})", finish
    for file in (key, value):
        check_matrices(file)
    matrices, others = key.content.rotation, value.content.rotation
    for layer in sorted(matrices.keys() ^ others.keys()):
        lacking = value if layer in matrices else key
        yield f"{lacking.path.name} has no layer {layer}, but the other file does", _FETCH_AGAIN
    both = f"{key.path.name} and {value.path.name}"
    for name in _SHARED:
        if key.calibration.get(name) != value.calibration.get(name):
            yield f"{both} do not belong together: their {name} differs", _FETCH_AGAIN
    # Only data-free rotations may be the same for keys and values.
    pairs = ((matrices[i].float(), others[i].float()) for i in matrices)
    if data_free_name(key) == GIVEN and all(torch.equal(*each) for each in pairs):
        yield f"{both} hold the same matrices", _FETCH_AGAIN


def find_geometry(files: Files, model: str, revision: str | None) -> tuple[Source, Geometry]:
    """The model and its geometry. Raises `RotationZooError` for files that do not fit."""
    first, source = next(iter(files.values())), find(model, revision)
    geometry = geometry_on_meta(loading.on_meta(loading.load_config(source), source.name))
    if geometry is None:
        unknown = f"what {model} caches is unknown without its weights"
        raise UnsupportedModel(unknown, hint=f"calibrate it: rotationzoo calibrate {model}")
    if not files.keys() & {side for layer in geometry for side in layer.sides}:
        held = f"{first.path} holds rotations of {' and '.join(f'{side}s' for side in files)}"
        raise UnsupportedModel(f"{held}, and {model} is not known to cache any", _CHECK)
    _check_model(model, source, first)
    for side, file in files.items():
        for misfit in _misfits(side, file, geometry):
            raise RotationZooError(f"these files are not for {model}: {misfit}", _CHECK)
    # Engines subtract a key mean and never add it back, which changes what some models compute.
    if first.side == "key" and first.content.mean and (moved := shifted_layers(geometry)):
        changed = f"changes what {model} computes: {shift_reason(moved)}"
        hint = "import files that were made without a key mean"
        raise RotationZooError(f"{first.path.name} centers keys, which {changed}", hint)
    return source, geometry


def _check_model(model: str, source: Source, file: RotationFile) -> None:
    """Raise `RotationZooError` if the file names another model than the user does."""
    stated = file.calibration
    config, weights = stated.get("config_sha256"), stated.get("weights_fingerprint")
    named = str(stated.get("model") or stated.get("model_path") or "")
    theirs, ours = (path.rstrip("/").rsplit("/", 1)[-1].lower() for path in (named, model))
    # A local folder may have any name, so only names of hub models are compared.
    other_name = source.revision is not None and theirs not in ("", ours)
    contradicts = config != hash_config(source.folder) if config else other_name
    made = f"{file.path.name} says that it was made for"
    if contradicts:
        hint = f"name that model: --model {named}" if named else _CHECK
        raise RotationZooError(f"{made} {named or 'another config'}, and not for {model}", hint)
    if weights and has_weights(source) and weights != weights_fingerprint(source):
        raise RotationZooError(f"{made} other weights than {model} has", _CHECK)


def _misfits(side: str, file: RotationFile, geometry: Geometry) -> Iterator[str]:
    """The differences between the layers of a model and those of a file."""
    layers, content = {layer.index: layer for layer in cached_layers(geometry)}, file.content
    for missing in sorted(layers.keys() - content.rotation.keys()):
        yield f"they have no {side} rotation for layer {missing}"
    for extra in sorted(content.rotation.keys() - layers.keys()):
        yield f"they have layer {extra}, which caches no {side}s in the model"
    for index, layer in layers.items():
        matrix, mean, dim = content.rotation[index], content.mean.get(index), layer.dims.get(side)
        wrong = matrix.shape[-1] != dim or (matrix.ndim == 3 and len(matrix) != layer.kv_heads)
        if mean is not None and mean.ndim == 2:
            wrong |= len(mean) not in (1, layer.kv_heads)  # one mean may serve all heads
        if wrong:
            heads = f"{layer.kv_heads} KV heads with {side}s of {dim}"
            yield f"layer {index} has {heads}, the file {list(matrix.shape)}"


_SERVED = ("key_clip", "value_clip", "sink", "recent")
# The index names rotations of latents so. Their server does not clip.
_OF_LATENTS = {"name": "oscar-latent", "pooling": "head", "key_clip": 1.0, "value_clip": 1.0}
_OF_LATENTS |= {"key_statistic": "key", "value_statistic": "value"}


def import_(job: Import) -> Artifact:
    """Read and check the files, and write an artifact unless it exists."""
    started = time.monotonic()
    check_replaceable(job.output)
    check_writable(job.output)
    files = gather_files(job.files)
    source, geometry = find_geometry(files, job.model, job.revision)
    first = next(iter(files.values()))
    group_size = job.group_size or first.group_size
    check_group_size(group_size, head_dims(geometry))
    recipe, notes = _recipe_of(files, job, group_size)
    measured = {side: _measure(file.path) for side, file in files.items()}
    identity = {side: file["sha256"] for side, file in measured.items()}
    identity |= {"recipe": recipe.hash, "model": source.label, "revision": job.revision or ""}
    if (finished := finished_artifact(job.output, job.restart, identity)) is not None:
        return finished
    stated = first.calibration
    # Paths on the machine that made the file become names.
    names = {key: name_of(value) for key, value in stated.items() if isinstance(value, str)}
    fingerprint = weights_fingerprint(source) if has_weights(source) else None
    rotations = _rotations_of(files, recipe, geometry)
    seconds = round(time.monotonic() - started, 3)
    content = {
        # The fingerprint is of the weights that the user names; nothing in the files confirms it.
        "model": loading.describe(source, loading.load_config(source), fingerprint),
        "geometry": geometry_json(geometry),
        "recipe": recipe.published(),
        "recipe_sha256": recipe.hash,
        "calibration": None,
        "imported": {
            "format": first.format,
            "files": measured,
            "objectives": {side: file.content.objective for side, file in files.items()},
            "calibration": {**stated, **names},
            "notes": notes,
        },
        "identity": identity,
        "versions": library_versions(),
        "run": {"device": "cpu", "dtype": None, "seconds": seconds, "peak_memory_bytes": None},
        "metrics": {"orthogonality_error": rotations.orthogonality_error},
    }
    hint = "fetch the files again, or ask who made them"
    return write_sound_artifact(job.output, rotations, None, content, hint=hint)


def _recipe_of(files: Files, job: Import, group_size: int | None) -> tuple[Recipe, list[str]]:
    """The recipe that the user and the files state, and notes. Raises `RotationZooError`."""
    first, published = next(iter(files.values())), PRESETS["oscar-v1"]
    of_latents = first.side == LATENT  # whose folder may have any name
    notes = []
    for file in files.values():
        if any(matrix.dtype != torch.float32 for matrix in file.content.rotation.values()):
            notes.append(f"{file.path.name} is not float32; its matrices were converted")
    named = set(map(data_free_name, files.values()))
    composition = named.pop() if len(named) == 1 and not of_latents else GIVEN
    per_head = any(file.content.per_head for file in files.values())
    stated: dict[str, Any] = {
        "name": composition if composition in DATA_FREE else "imported",
        "composition": composition,
        "pooling": ("layer", "head")[per_head],
        "center_keys": bool(first.content.mean),
        "group_size": group_size,
    }
    stated |= _OF_LATENTS if of_latents else {}
    said = {name: first.calibration.get(name) for name in _SERVED}
    stated |= {name: value for name, value in said.items() if isinstance(value, int | float)}
    if job.clip:
        stated["key_clip"], stated["value_clip"] = job.clip
    if job.windows:
        stated["sink"], stated["recent"] = job.windows
    with as_refusal(f"{first.path.name} has values that no recipe can have"):
        recipe = Recipe.model_validate({**published.model_dump(), **stated})
    if not stated.keys() >= set(_SERVED):
        clips = f"{recipe.key_clip:g}/{recipe.value_clip:g} and "
        what, clips = ("windows", "") if of_latents else ("clip ratios or windows", clips)
        assumed = f"{clips}{recipe.sink}/{recipe.recent}"
        notes.append(f"the files do not say {what}; assumed are {assumed}")
    return recipe, notes


def _measure(path: Path) -> dict[str, Any]:
    """Name, bytes and sha256 of a file. A folder of latents has the hash of its list of hashes."""
    if not path.is_dir():
        return {"name": path.name, "size": path.stat().st_size, "sha256": sha256(path)}
    paths = latent_files(path)
    lines = "".join(f"{sha256(file)}  {file.name}\n" for file in paths)
    size = sum(file.stat().st_size for file in paths)
    return {"name": path.name, "size": size, "sha256": digest(lines.encode())}


def _rotations_of(files: Files, recipe: Recipe, geometry: Geometry) -> Rotations:
    """The rotations in float32. Layers of a file may share a tensor, so all are copies."""
    layers = {}
    for layer in cached_layers(geometry):
        sides, index = {}, layer.index
        for side, file in files.items():
            content, dim = file.content, file.content.rotation[index].shape[-1]
            heads = layer.kv_heads if recipe.pooling == "head" else 1
            clip = torch.full((layer.kv_heads,), recipe.clip(side), dtype=torch.float64)
            extras = {}
            if index in content.eigenvalues:
                extras["eigenvalues"] = _copy(content.eigenvalues[index], heads, dim)
            if index in content.mean:
                extras["mean"] = _copy(content.mean[index], layer.kv_heads, dim)
            matrix = _copy(content.rotation[index], heads, dim, dim)
            sides[side] = Rotation(matrix=matrix, clip=clip, **extras)
        layers[index] = LayerRotations.of_sides(sides)
    return Rotations(layers)


def _copy(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    return tensor.float().expand(shape).clone(memory_format=torch.contiguous_format)
