"""Importing rotations of latents (MLA) that others published: a folder with a file for each
layer."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rotationzoo.engines.base import SideMatrices
from rotationzoo.engines.formats.oscar_pt_reader import read_latent
from rotationzoo.engines.formats.reading import check_layer
from rotationzoo.engines.rotation_checks import check_matrices
from rotationzoo.engines.rotation_file import RotationFile, normalise
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import Geometry, cached_layers, has_latents
from rotationzoo.linalg.compositions import GIVEN
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.source import Source, find
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import LATENT
from rotationzoo.storage.files import digest, sha256

_FILE = re.compile(r"layer_(\d{1,9})\.pt")
# What OSCAR's `compute_mla_oscar_rotation.py` calls a folder: the eigenbasis of the second moment
# of latents, a permutation, and Hadamard matrices over groups of so many channels.
_FITTED = re.compile(r"c_kv_rcov_phblock_g([1-9]\d{0,5})")
NAME = "oscar-latent"
"""The recipe of imported rotations of latents, as the index has it."""


def find_latent_folder(files: Sequence[Path]) -> Path | None:
    """The folder, if the only path that is given is one with a file for each layer."""
    folder = files[0].expanduser()
    if len(files) > 1 or not folder.is_dir():
        return None
    return folder if _files_in(folder) else None


def _files_in(folder: Path) -> list[Path]:
    """The files of layers in a folder."""
    return sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name))


def read_latents(folder: Path, transposed: bool) -> RotationFile:
    """The rotations of all layers in a folder, orthogonal and applied as `c @ R`.

    Raises `RotationZooError` for a damaged file, for a matrix that is not orthogonal, and if only
    some layers have a mean or eigenvalues.
    """
    sides: dict[int, SideMatrices] = {}
    for path in _files_in(folder):
        layer = check_layer(path, path.stem.removeprefix("layer_"))
        if layer in sides:
            raise RotationZooError(f"{folder.name} has layer {layer} twice")
        sides[layer] = read_latent(path, layer)
    tables = {}
    for name in ("rotation", "eigenvalues", "mean"):
        table = {layer: getattr(side, name).get(layer) for layer, side in sorted(sides.items())}
        tables[name] = {layer: tensor for layer, tensor in table.items() if tensor is not None}
        if tables[name] and (lacking := sorted(sides.keys() - tables[name].keys())):
            raise RotationZooError(f"{folder.name} has no {name} for layer {lacking[0]}")
    content = SideMatrices(objective=folder.resolve().name, **tables)
    file = normalise(RotationFile(folder, "latents", LATENT, content), transposed)
    check_matrices(file)
    for layer, matrix in file.content.rotation.items():
        if matrix.ndim != 2:
            raise RotationZooError(f"layer {layer} of {folder.name} has a matrix for each head")
    return file


def hash_of(folder: Path) -> tuple[int, str]:
    """The bytes of the files of all layers together, and a sha256 of their names and hashes."""
    paths = _files_in(folder)
    lines = "".join(f"{sha256(path)}  {path.name}\n" for path in paths)
    return sum(path.stat().st_size for path in paths), digest(lines.encode())


def fit_to_model(
    file: RotationFile, model: str | None, revision: str | None
) -> tuple[Source, Geometry]:
    """The named model and its geometry. Raises `RotationZooError` for files that do not fit it, and
    without a model: they do not say what is cached beside a latent."""
    folder = file.path
    if model is None:
        raise RotationZooError(
            f"{folder} holds rotations of latents, which do not say what is cached beside them",
            hint="name the model, which tells: --model MODEL",
        )
    source = find(model, revision)
    geometry = geometry_on_meta(loading.on_meta(loading.load_config(source), source.name))
    if geometry is None or not has_latents(geometry):
        raise UnsupportedModel(
            f"{folder} holds rotations of latents (MLA), and {model} is not known to cache any",
            hint="check the model",
        )
    layers = {layer.index: layer.key_dim for layer in cached_layers(geometry)}
    shapes = {index: matrix.shape[-1] for index, matrix in file.content.rotation.items()}
    if wrong := sorted(dict(layers.items() ^ shapes.items())):
        index = wrong[0]
        cached, held = layers.get(index, "no"), shapes.get(index, "no")
        raise RotationZooError(
            f"these files are not for {model}: its layer {index} caches a latent of {cached} "
            f"elements, and the files have {held}",
            hint="check the model",
        )
    return source, geometry


def recipe_of_latents(
    file: RotationFile, group_size: int | None, served: Mapping[str, float]
) -> tuple[Recipe, list[str]]:
    """The recipe, and remarks on what neither the files nor the user state. A folder's name is all
    that tells how bare matrices were made."""
    composition, notes = GIVEN, list(file.notes)
    match = _FITTED.fullmatch(file.content.objective)
    if match and group_size in (None, int(match[1])):
        composition, group_size = "r_pbr_hblock", int(match[1])
    else:
        notes.append(
            "nothing says how the matrices were made; of OSCAR's tool for latents, which names its "
            "folder c_kv_rcov_phblock_g128, in its groups, they would be checked against a model"
        )
    # The server clips no latents.
    usual = PRESETS["oscar-v1"].model_copy(update={"key_clip": 1.0, "value_clip": 1.0})
    stated = {
        "name": NAME,
        "composition": composition,
        "pooling": "head",
        "key_statistic": "key",
        "value_statistic": "value",
        "center_keys": bool(file.content.mean),
        "group_size": group_size,
        **served,
    }
    recipe = Recipe.model_validate({**usual.model_dump(), **stated})
    if not {"sink", "recent"} <= served.keys():
        windows = f"{recipe.sink}/{recipe.recent}"
        notes.append(f"the files do not say windows; assumed are {windows}")
    return recipe, notes
