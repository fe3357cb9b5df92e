"""Rotation files that others made -> an artifact, which keeps their matrices as they are."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.store import MANIFEST, Artifact
from rotationzoo.artifact.writer import check_replaceable, library_versions
from rotationzoo.calibration import soundness
from rotationzoo.calibration.identity import differences
from rotationzoo.engines import recognise
from rotationzoo.engines.base import RotationFile, Side
from rotationzoo.engines.recognise import Described
from rotationzoo.errors import RotationZooError, UnsupportedModel, first_sentence
from rotationzoo.linalg import compositions
from rotationzoo.linalg.compositions import DATA_FREE
from rotationzoo.linalg.moments import Average, Averages
from rotationzoo.model import centering, loading
from rotationzoo.model.geometry import (
    Geometry,
    Layer,
    cached_layers,
    geometry_json,
    geometry_on_meta,
    shifted_layers,
)
from rotationzoo.model.source import Source, config_hash, find, has_weights, weights_fingerprint
from rotationzoo.recipe import PRESETS, Recipe, name_of
from rotationzoo.rotations import LayerRotations, Rotation, Rotations
from rotationzoo.storage.files import sha256


@dataclass(frozen=True)
class Import:
    """One import as the user asked for it. What a file does not say, such as clip ratios, is the
    recipe `oscar-v1`'s."""

    files: Sequence[Path]
    output: Path
    model: str | None = None
    revision: str | None = None
    clip: tuple[float, float] | None = None
    windows: tuple[int, int] | None = None
    group_size: int | None = None
    transposed: bool = False
    """The files hold R transposed, although their format does not."""
    restart: bool = False


def import_(job: Import) -> Artifact:
    """Read, check and write; an artifact of this very import that is there already is returned as
    it is.

    Raises `RotationZooError` for what is ambiguous or broken, naming it.
    """
    started = time.monotonic()
    check_replaceable(job.output)
    key, value = (recognise.normalise(side, job.transposed) for side in recognise.gather(job.files))
    described = {"key": recognise.describe(key), "value": recognise.describe(value)}
    recognise.check(key, value, described)
    source, geometry = _geometry(job, key, value)
    if key.content.mean and (moved := shifted_layers(geometry)):
        raise RotationZooError(
            f"{key.path.name} centres keys, which {job.model} does not bear: {centering.reason(moved)}",
            hint="import files that were made without a key mean",
        )
    said = key.calibration
    group_size = job.group_size or _stated_group(said)
    for dim in {dim for layer in geometry for dim in (layer.key_dim, layer.value_dim)}:
        if dim % (group_size or dim):
            raise RotationZooError(
                f"groups of {group_size} channels do not divide the head dimension {dim}",
                hint="--group-size",
            )
    composition, notes = recognise.recognise(key, value, described, group_size)
    if composition == "r_pbr_hblock" and group_size is None:
        composition = compositions.GIVEN
        notes.append(
            "the composition depends on the group size, which the files do not say: --group-size names it"
        )
    notes += [note for side in (key, value) for note in side.notes]
    recipe, assumed = _recipe(job, key, value, described, composition, group_size)
    notes += assumed
    identity = _identity(job, source, key, value, recipe)
    if (finished := _finished(job, identity)) is not None:
        return finished
    rotations = _rotations(key, value, recipe, geometry)
    error = rotations.orthogonality_error
    exact = error <= soundness.ORTHOGONAL
    statistics = recover_statistics(rotations, recipe) if exact else {}
    if not exact:
        notes.append(
            f"the matrices are off orthogonality by {error:.0e}, so no statistics are recovered from them"
        )
    elif not statistics and recipe.composition not in DATA_FREE:
        notes.append(
            "no statistics can be recovered: the files have no eigenvalues, or an unknown composition"
        )
    files = {
        name: {"name": side.path.name, "size": side.path.stat().st_size, "sha256": identity[name]}
        for name, side in (("key", key), ("value", value))
    }
    manifest: dict[str, Any] = {
        "model": _model(source),
        "geometry": geometry_json(geometry),
        "recipe": recipe.published(),
        "recipe_sha256": recipe.hash,
        "calibration": None,
        "imported": {
            "format": key.format,
            "files": files,
            "objectives": {"key": key.content.objective, "value": value.content.objective},
            "calibration": _told(key.calibration),
            "notes": notes,
        },
        "identity": identity,
        "versions": library_versions(),
        "run": {
            "device": "cpu",
            "dtype": None,
            "seconds": round(time.monotonic() - started, 3),
            "peak_memory_bytes": None,
        },
        "metrics": {"orthogonality_error": error},
    }
    return soundness.write(
        job.output,
        rotations,
        statistics or None,
        manifest,
        hint="fetch the files again, or ask who made them",
    )


def _told(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of its making, without the paths of the machine that it was made on."""
    told = {
        key: value
        for key, value in calibration.items()
        if isinstance(value, str | int | float | bool)
    }
    return {key: name_of(value) if isinstance(value, str) else value for key, value in told.items()}


def _stated_group(said: Mapping[str, Any]) -> int | None:
    group = said.get("group_size")
    return group if isinstance(group, int) and group > 0 else None


def _identity(
    job: Import, source: Source | None, key: RotationFile, value: RotationFile, recipe: Recipe
) -> dict[str, str]:
    """What decides the result."""
    model = {"model": source.label, "revision": job.revision or ""} if source else {}
    return {
        "key": sha256(key.path),
        "value": sha256(value.path),
        "recipe": recipe.hash,
        **model,
    }


def _finished(job: Import, identity: dict[str, str]) -> Artifact | None:
    if job.restart or not (job.output / MANIFEST).is_file():
        return None
    artifact = Artifact.open(job.output)
    theirs: dict[str, Any] = dict(artifact.manifest.identity)
    if "model" in theirs:  # as a path, where an earlier version imported for a folder
        theirs = theirs | {"model": name_of(theirs["model"])}
    if differences(theirs, identity):
        raise RotationZooError(
            f"{job.output} exists and holds other work",
            hint="choose another place with --output, or replace it with --restart",
        )
    return None if artifact.damaged_files() else artifact


def recover_statistics(rotations: Rotations, recipe: Recipe) -> Averages:
    """`Sigma = U diag(lambda) U^T`, float64 `[H or 1, D, D]`, for every side that has eigenvalues
    and a known composition."""
    averages: Averages = {}
    if not recipe.has_eigenbasis:
        return averages
    kinds = {"key": recipe.key_statistic, "value": recipe.value_statistic}
    for layer, side, rotation in rotations.each():
        if rotation.eigenvalues is None:
            continue
        group = recipe.group(rotation.dim)
        basis = compositions.recover_basis(rotation.matrix, recipe.composition, group)
        moment = basis @ torch.diag_embed(rotation.eigenvalues.double()) @ basis.mT
        averages.setdefault(layer, {})[kinds[side]] = Average((moment + moment.mT) / 2)
    return averages


def _geometry(
    job: Import, key: RotationFile, value: RotationFile
) -> tuple[Source | None, Geometry]:
    """Of the named model, which the files must fit; without one, what the files alone tell."""
    layers = sorted(key.content.rotation)
    if job.model is None:
        steps = {after - before for before, after in pairwise(layers)}
        if len(steps) > 1:
            gap = next(i for i, j in pairwise(layers) if j - i > min(steps))
            raise RotationZooError(
                f"{key.path.name} may lack layers after layer {gap}: the numbers of those it has are irregular",
                hint="name the model, which tells: --model MODEL",
            )
        return None, [_layer(layer, key.content, value.content) for layer in layers]
    source = find(job.model, job.revision)
    geometry = geometry_on_meta(loading.on_meta(loading.load_config(source), source.name))
    if geometry is None:
        raise UnsupportedModel(
            f"what {job.model} caches shows only with its weights", hint="import without --model"
        )
    _check_model(job.model, source, key)
    for side, content in (("key", key.content), ("value", value.content)):
        _check_fit(job.model, side, content, geometry)
    return source, geometry


def _layer(index: int, key: Side, value: Side) -> Layer:
    tables = key.rotation[index], value.rotation[index]
    counts = {len(table) for table in tables if table.ndim == 3}
    if index in key.mean and key.mean[index].ndim == 2:
        counts.add(len(key.mean[index]))
    if len(counts) > 1:
        raise RotationZooError(
            f"the files disagree on the KV heads of layer {index}: {' and '.join(map(str, sorted(counts)))}"
        )
    heads = counts.pop() if counts else 1
    return Layer(index, index, heads, heads, tables[0].shape[-1], tables[1].shape[-1])


def _check_fit(model: str, side: str, content: Side, geometry: Geometry) -> None:
    cached = {layer.index: layer for layer in cached_layers(geometry)}
    wrong = f"these files are not for {model}"
    if missing := sorted(cached.keys() - content.rotation.keys()):
        raise RotationZooError(
            f"{wrong}: they have no {side} rotation for layer {missing[0]}", hint="check the model"
        )
    if extra := sorted(content.rotation.keys() - cached.keys()):
        raise RotationZooError(
            f"{wrong}: they have layer {extra[0]}, which caches no {side}s there",
            hint="check the model",
        )
    for index, layer in cached.items():
        matrix, dim = content.rotation[index], layer.key_dim if side == "key" else layer.value_dim
        per_head = [
            table
            for table in (matrix, content.mean.get(index))
            if table is not None and table.shape[:-1].numel() > 1
        ]
        per_head = [table for table in per_head if table.ndim == (3 if table is matrix else 2)]
        if matrix.shape[-1] != dim or any(len(table) != layer.kv_heads for table in per_head):
            raise RotationZooError(
                f"{wrong}: layer {index} has {layer.kv_heads} KV heads with {side}s of {dim}, the file {list(matrix.shape)}",
                hint="check the model",
            )


def _check_model(model: str, source: Source, key: RotationFile) -> None:
    """What a file says of its model must not contradict the name that the user gives."""
    said = key.calibration
    config = said.get("config_sha256")
    named = str(said.get("model") or said.get("model_path") or "")
    contradicts = (
        config != config_hash(source) if config else _last(named) not in ("", _last(model))
    )
    if contradicts and (config or source.revision is not None):
        raise RotationZooError(
            f"{key.path.name} says that it was made for {named or 'another config'}, and not for {model}",
            hint=f"name that model: --model {named}" if named else "check the model",
        )
    weights = said.get("weights_fingerprint")
    if weights and has_weights(source) and weights != weights_fingerprint(source):
        raise RotationZooError(
            f"{key.path.name} says that it was made for other weights than those of {model}",
            hint="check the model",
        )


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1].lower()


def _model(source: Source | None) -> dict[str, Any]:
    if source is None:
        unknown = ("revision", "license", "config_sha256", "weights_fingerprint")
        return {"id": "unknown", "architecture": "unknown", **dict.fromkeys(unknown)}
    # Of the weights that the user says the files are for; nothing in the files vouches for it.
    fingerprint = weights_fingerprint(source) if has_weights(source) else None
    return loading.describe(source, loading.load_config(source), fingerprint)


def _recipe(
    job: Import,
    key: RotationFile,
    value: RotationFile,
    described: Mapping[str, Described],
    composition: str,
    group_size: int | None,
) -> tuple[Recipe, list[str]]:
    """What the files and the user say, and remarks on what neither does."""
    defaults = PRESETS["oscar-v1"]
    per_head = key.content.per_head or value.content.per_head
    changes: dict[str, Any] = {
        "name": composition if composition in DATA_FREE else "imported",
        "composition": composition,
        "pooling": "head" if per_head else "layer",
        "key_statistic": described["key"].statistic or defaults.key_statistic,
        "value_statistic": described["value"].statistic or defaults.value_statistic,
        "center_keys": bool(key.content.mean),
        "group_size": group_size,
    }
    served = ("key_clip", "value_clip", "sink", "recent")
    changes |= {
        name: key.calibration[name]
        for name in served
        if isinstance(key.calibration.get(name), int | float)
    }
    if job.clip:
        changes["key_clip"], changes["value_clip"] = job.clip
    if job.windows:
        changes["sink"], changes["recent"] = job.windows
    try:
        recipe = Recipe.model_validate({**defaults.model_dump(), **changes})
    except ValueError as error:
        raise RotationZooError(
            f"{key.path.name} says what no recipe can: {first_sentence(error)}"
        ) from error
    notes = []
    if any(name not in changes for name in served):
        notes.append(
            f"the files do not say clip ratios or windows; assumed are {recipe.key_clip:g}/{recipe.value_clip:g} and "
            f"{recipe.sink}/{recipe.recent}"
        )
    published = {"name", "group_size", *served}
    if recipe.model_dump(exclude=published) == defaults.model_dump(exclude=published):
        recipe = recipe.model_copy(update={"name": "oscar-v1"})
    return recipe, notes


def _rotations(
    key: RotationFile, value: RotationFile, recipe: Recipe, geometry: Geometry
) -> Rotations:
    layers = {}
    for layer in cached_layers(geometry):
        sides = (key.content, recipe.key_clip), (value.content, recipe.value_clip)
        layers[layer.index] = LayerRotations(
            *(_rotation(side, layer, clip, recipe) for side, clip in sides)
        )
    return Rotations(layers)


def _rotation(side: Side, layer: Layer, clip: float, recipe: Recipe) -> Rotation:
    """One side of one layer, in copies: files of one matrix for all layers hold it once, and
    safetensors refuses tensors that share memory."""
    matrix, eigenvalues, mean = (
        table.get(layer.index) for table in (side.rotation, side.eigenvalues, side.mean)
    )
    assert matrix is not None
    dim, heads = matrix.shape[-1], layer.kv_heads if recipe.pooling == "head" else 1
    return Rotation(
        matrix=_copy(matrix.expand(heads, dim, dim)),
        clip=torch.full((layer.kv_heads,), clip, dtype=torch.float64),
        eigenvalues=None if eigenvalues is None else _copy(eigenvalues.expand(heads, dim)),
        mean=None if mean is None else _copy(mean.float().expand(layer.kv_heads, dim)),
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
