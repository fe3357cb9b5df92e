"""Importing other tools' rotation files as an artifact, with their matrices unchanged, and with the
statistics that can be recovered from them.

The recipe is what the files and the user state. What neither states is taken from the published
fitter's recipe, `oscar-v1`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.store import MANIFEST, Artifact
from rotationzoo.calibration.checkpoint import differences
from rotationzoo.calibration.soundness import write_sound_artifact
from rotationzoo.engines.base import SideMatrices
from rotationzoo.engines.gather import gather_pair
from rotationzoo.engines.import_geometry import find_geometry
from rotationzoo.engines.import_latents import (
    find_latent_folder,
    fit_to_model,
    hash_of,
    read_latents,
    recipe_of_latents,
)
from rotationzoo.engines.objectives import Described, describe
from rotationzoo.engines.recognise import recognise_composition
from rotationzoo.engines.rotation_checks import check_pair
from rotationzoo.engines.rotation_file import Pair, RotationFile, normalise
from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.geometry import (
    Geometry,
    Layer,
    cached_layers,
    check_group_size,
    geometry_json,
    head_dims,
    shifted_layers,
)
from rotationzoo.linalg import compositions
from rotationzoo.linalg.compositions import DATA_FREE, GIVEN, ORTHOGONAL
from rotationzoo.linalg.moments import Average, Averages
from rotationzoo.model import centering, loading
from rotationzoo.model.source import Source, has_weights, weights_fingerprint
from rotationzoo.recipe import Recipe, name_of
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import LATENT, LayerRotations, Rotation, Rotations
from rotationzoo.storage.files import sha256
from rotationzoo.storage.folders import check_writable
from rotationzoo.writer import check_replaceable, library_versions

_SERVED = ("key_clip", "value_clip", "sink", "recent")
_PUBLISHED = "oscar-v1"


def recipe_of_files(
    pair: Pair,
    described: Mapping[str, Described],
    composition: str,
    group_size: int | None,
    served: Mapping[str, float],
) -> tuple[Recipe, list[str]]:
    """The recipe, and remarks on what neither the files nor the user state.

    `described` maps each side to what its file states. `composition` is the recognised one.
    `served` holds the user's clip ratios and windows, which override the files' own. Raises
    `RotationZooError` if the files state something that no recipe allows.
    """
    defaults = PRESETS[_PUBLISHED]
    calibration = pair.key.calibration
    served_by_files = {
        name: calibration[name]
        for name in _SERVED
        if isinstance(calibration.get(name), int | float)
    }
    name = composition if composition in DATA_FREE else "imported"
    per_head = any(file.content.per_head for file in pair)
    pooling = "head" if per_head else "layer"
    stated: dict[str, Any] = {
        "name": name,
        "composition": composition,
        "pooling": pooling,
        "key_statistic": described["key"].statistic or defaults.key_statistic,
        "value_statistic": described["value"].statistic or defaults.value_statistic,
        "center_keys": bool(pair.key.content.mean),
        "group_size": group_size,
        **served_by_files,
        **served,
    }
    try:
        recipe = Recipe.model_validate({**defaults.model_dump(), **stated})
    except ValueError as error:
        raise RotationZooError(
            f"{pair.key.path.name} says what no recipe can: {first_sentence(error)}"
        ) from error
    notes = []
    if any(name not in stated for name in _SERVED):
        notes.append(
            "the files do not say clip ratios or windows; assumed are "
            f"{recipe.key_clip:g}/{recipe.value_clip:g} and {recipe.sink}/{recipe.recent}"
        )
    return _named(recipe, defaults), notes


def _named(recipe: Recipe, published: Recipe) -> Recipe:
    """The recipe, under the published recipe's name if it makes its matrices in the same way.

    How the matrices are served (group size, clip ratios, windows) does not matter for the name.
    """
    served = {"name", "group_size", *_SERVED}
    if recipe.model_dump(exclude=served) != published.model_dump(exclude=served):
        return recipe
    return recipe.model_copy(update={"name": _PUBLISHED})


def rotations_of_files(pair: Pair, recipe: Recipe, geometry: Geometry) -> Rotations:
    """The files' matrices, with the clip ratios of the recipe."""
    layers = {}
    for layer in cached_layers(geometry):
        key = _rotation(pair.key.content, layer, recipe.key_clip, recipe)
        value = _rotation(pair.value.content, layer, recipe.value_clip, recipe)
        layers[layer.index] = LayerRotations(key, value)
    return Rotations(layers)


def recover_statistics(rotations: Rotations, recipe: Recipe) -> Averages:
    """The second moments `Sigma = U diag(lambda) U^T`, float64 `[H or 1, D, D]`.

    They are recovered for every side that has eigenvalues and a known composition.
    """
    averages: Averages = {}
    if not recipe.has_eigenbasis:
        return averages
    for layer, side, rotation in rotations.each():
        if rotation.eigenvalues is None:
            continue
        group = recipe.group(rotation.dim)
        basis = compositions.recover_basis(rotation.matrix, recipe.composition, group)
        moment = basis @ torch.diag_embed(rotation.eigenvalues.double()) @ basis.mT
        symmetric = (moment + moment.mT) / 2
        (kind,) = recipe.target_kinds(side)
        averages.setdefault(layer, {})[kind] = Average(symmetric)
    return averages


def _rotation(side: SideMatrices, layer: Layer, clip: float, recipe: Recipe) -> Rotation:
    """One side of one layer, copied.

    A file with one matrix for all layers may store it only once, and safetensors refuses tensors
    that share memory.
    """
    matrix = side.rotation[layer.index]
    eigenvalues, mean = side.eigenvalues.get(layer.index), side.mean.get(layer.index)
    dim = matrix.shape[-1]
    heads = layer.kv_heads if recipe.pooling == "head" else 1
    if eigenvalues is not None:
        eigenvalues = _copy(eigenvalues.expand(heads, dim))
    if mean is not None:
        mean = _copy(mean.float().expand(layer.kv_heads, dim))
    return Rotation(
        matrix=_copy(matrix.expand(heads, dim, dim)),
        clip=torch.full((layer.kv_heads,), clip, dtype=torch.float64),
        eigenvalues=eigenvalues,
        mean=mean,
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Import:
    """The settings of one import, as the user gave them.

    What neither the files nor the user state, such as clip ratios, is taken from the recipe
    `oscar-v1`.
    """

    files: Sequence[Path]
    output: Path
    model: str | None = None
    revision: str | None = None
    clip: tuple[float, float] | None = None
    """Clip ratios of keys and of values."""
    windows: tuple[int, int] | None = None
    """Sink and recent tokens."""
    group_size: int | None = None
    transposed: bool = False
    """Whether the files hold R transposed, against the convention of their format."""
    restart: bool = False

    @property
    def served(self) -> dict[str, float]:
        """The recipe fields that the user sets."""
        fields: dict[str, float] = {}
        if self.clip:
            fields["key_clip"], fields["value_clip"] = self.clip
        if self.windows:
            fields["sink"], fields["recent"] = self.windows
        return fields


def import_(job: Import) -> Artifact:
    """Read the files, check them, and write an artifact.

    If the output already holds the artifact of this very import, it is returned unchanged. Raises
    `RotationZooError` that names whatever is ambiguous or broken.
    """
    started = time.monotonic()
    check_replaceable(job.output)
    check_writable(job.output)
    if (folder := find_latent_folder(job.files)) is not None:
        return _import_latents(job, folder, started)
    pair = Pair(*(normalise(file, job.transposed) for file in gather_pair(job.files)))
    described = {side: describe(file) for side, file in pair.items()}
    check_pair(pair, described)
    source, geometry = find_geometry(pair, job.model, job.revision)
    _check_centering(job, pair.key, geometry)
    group_size = job.group_size
    stated = pair.key.calibration.get("group_size")
    if group_size is None and isinstance(stated, int) and stated > 0:
        group_size = stated
    check_group_size(group_size, head_dims(geometry))
    composition, notes = recognise_composition(pair, described, group_size)
    if composition == "r_pbr_hblock" and group_size is None:
        composition = GIVEN
        notes.append(
            "the composition depends on the group size, which the files do not say: "
            "--group-size names it"
        )
    notes += pair.notes
    recipe, assumed = recipe_of_files(pair, described, composition, group_size, job.served)
    notes += assumed
    identity = _identity(
        job, source, recipe, {side: sha256(file.path) for side, file in pair.items()}
    )
    if (finished := _finished_artifact(job, identity)) is not None:
        return finished

    rotations = rotations_of_files(pair, recipe, geometry)
    imported = _imported_content(pair, identity, notes)
    parts = source, geometry, recipe
    return _write(job, parts, rotations, imported, identity, started)


def _import_latents(job: Import, folder: Path, started: float) -> Artifact:
    """The same of a folder with rotations of latents. Raises as `import_`."""
    file = read_latents(folder, job.transposed)
    source, geometry = fit_to_model(file, job.model, job.revision)
    recipe, notes = recipe_of_latents(file, job.group_size, job.served)
    check_group_size(recipe.group_size, head_dims(geometry))
    size, digest = hash_of(folder)
    identity = _identity(job, source, recipe, {LATENT: digest})
    if (finished := _finished_artifact(job, identity)) is not None:
        return finished
    layers = {}
    for layer in cached_layers(geometry):
        rotation = _rotation(file.content, layer, recipe.clip(LATENT), recipe)
        layers[layer.index] = LayerRotations.of_sides({LATENT: rotation})
    objective = file.content.objective
    imported = {
        "format": file.format,
        "files": {LATENT: {"name": objective, "size": size, "sha256": digest}},
        "objectives": {LATENT: objective},
        "calibration": {},
        "notes": notes,
    }
    parts = source, geometry, recipe
    return _write(job, parts, Rotations(layers), imported, identity, started)


def _write(
    job: Import,
    parts: tuple[Source | None, Geometry, Recipe],
    rotations: Rotations,
    imported: dict[str, Any],
    identity: dict[str, str],
    started: float,
) -> Artifact:
    """Write the artifact of imported rotations, with the statistics that can be recovered."""
    source, geometry, recipe = parts
    statistics, unrecovered = _statistics(rotations, recipe)
    imported["notes"] = [*imported["notes"], *unrecovered]
    content = {
        "model": _model_content(source),
        "geometry": geometry_json(geometry),
        "recipe": recipe.published(),
        "recipe_sha256": recipe.hash,
        "calibration": None,
        "imported": imported,
        "identity": identity,
        "versions": library_versions(),
        "run": {
            "device": "cpu",
            "dtype": None,
            "seconds": round(time.monotonic() - started, 3),
            "peak_memory_bytes": None,
        },
        "metrics": {"orthogonality_error": rotations.orthogonality_error},
    }
    hint = "fetch the files again, or ask who made them"
    return write_sound_artifact(job.output, rotations, statistics or None, content, hint=hint)


def _check_centering(job: Import, key: RotationFile, geometry: Geometry) -> None:
    """Raise `RotationZooError` if the model cannot take the file's key mean.

    Engines subtract it and never add it back, which changes what some models compute.
    """
    if key.content.mean and (moved := shifted_layers(geometry)):
        raise RotationZooError(
            f"{key.path.name} centers keys, which changes what {job.model} computes: "
            f"{centering.reason(moved)}",
            hint="import files that were made without a key mean",
        )


def _identity(
    job: Import, source: Source | None, recipe: Recipe, hashes: Mapping[str, str]
) -> dict[str, str]:
    """Everything that determines the result of an import; `hashes` of the files by side."""
    identity = {**hashes, "recipe": recipe.hash}
    if source:
        identity |= {"model": source.label, "revision": job.revision or ""}
    return identity


def _finished_artifact(job: Import, identity: dict[str, str]) -> Artifact | None:
    """The artifact of an earlier, identical import, or None if there is none or it is damaged.

    Raises `RotationZooError` if the output holds other work.
    """
    if job.restart or not (job.output / MANIFEST).is_file():
        return None
    artifact = Artifact.open(job.output)
    if differences(artifact.manifest.identity, identity):
        raise RotationZooError(
            f"{job.output} exists and holds other work",
            hint="choose another place with --output, or replace it with --restart",
        )
    return None if artifact.damaged_files() else artifact


def _statistics(rotations: Rotations, recipe: Recipe) -> tuple[Averages, list[str]]:
    """The statistics recovered from the rotations, or none and a remark that says why."""
    error = rotations.orthogonality_error
    # `not <=` instead of `>`, because NaN must not pass.
    if not error <= ORTHOGONAL:
        return {}, [
            f"the matrices are off orthogonality by {error:.0e}, so no statistics are recovered "
            "from them"
        ]
    statistics = recover_statistics(rotations, recipe)
    if not statistics and recipe.composition not in DATA_FREE:
        return {}, [
            "no statistics can be recovered: the files have no eigenvalues, or an unknown "
            "composition"
        ]
    return statistics, []


def _model_content(source: Source | None) -> dict[str, Any]:
    if source is None:
        unknown = ("revision", "license", "config_sha256", "weights_fingerprint")
        return {"id": "unknown", "architecture": "unknown", **dict.fromkeys(unknown)}
    # The fingerprint is of the weights that the user names; nothing in the files confirms them.
    fingerprint = weights_fingerprint(source) if has_weights(source) else None
    return loading.describe(source, loading.load_config(source), fingerprint)


def _imported_content(pair: Pair, identity: dict[str, str], notes: list[str]) -> dict[str, Any]:
    """The manifest's `imported` entry: which files were read, and what they stated."""
    files = {
        side: {"name": file.path.name, "size": file.path.stat().st_size, "sha256": identity[side]}
        for side, file in pair.items()
    }
    return {
        "format": pair.key.format,
        "files": files,
        "objectives": {side: file.content.objective for side, file in pair.items()},
        "calibration": _publishable(pair.key),
        "notes": notes,
    }


def _publishable(file: RotationFile) -> dict[str, Any]:
    """A file's statement about its calibration, without the paths of the machine that made it."""
    stated: dict[str, Any] = {}
    for key, value in file.calibration.items():
        if isinstance(value, str):
            stated[key] = name_of(value)
        elif isinstance(value, int | float):
            stated[key] = value
    return stated
