"""Finding the rotation files to import, and the checks that they belong together and to a model."""

import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch

from rotationzoo.artifact.manifest import hash_config
from rotationzoo.engines.formats.sglang_latent import latent_files
from rotationzoo.engines.rotation_file import RotationFile, check_matrices, describe, normalise
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import Geometry, cached_layers, shifted_layers
from rotationzoo.linalg.composition_table import DATA_FREE
from rotationzoo.model import centering, loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.source import Source, find, has_weights, weights_fingerprint
from rotationzoo.sides import LATENT, SIDES

Files = dict[str, RotationFile]
"""Side -> its file: `key` and `value`, or `latent`."""

IMPORTED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "latents": ("sglang_latent", latent_files),
    "gguf": ("gguf_file", lambda path: path.suffix == ".gguf"),
    "pt": ("oscar_pt", lambda path: True),
}
"""Formats of files that others made, one row each: the module of `formats`, imported when it is
used, whose `read` gives the sides in a file, and what tells such files. The first row counts."""

# The default names of `.pt` files. A GGUF file is found only if the user names it.
_NAME = re.compile(r"[kv]_(rotation|perhead)\w*\.pt")
# Entries of `calibration` that agree in both files of one run.
_SHARED = ("generation_id", "config_sha256", "model")
_FETCH_AGAIN = "fetch both again"
_CHECK = "check the model"


def gather_files(files: Sequence[Path]) -> Files:
    """Read the key side and the value side from the given files, or from a folder with one pair; or
    the latents from a folder with a file for each layer.

    Raises `RotationZooError` if a side is missing, unidentified or damaged, and if two files do not
    belong together.
    """
    paths = [path.expanduser() for path in files]
    if len(paths) == 1 and paths[0].is_dir() and not latent_files(paths[0]):
        paths = _pair_in(paths[0])
    read = [file for path in paths for file in _read(path)]
    if [file.side for file in read] == [LATENT]:
        latents = normalise(read[0])
        check_matrices(latents)
        return {LATENT: latents}
    pair = {side: normalise(file) for side, file in _pair_of(read).items()}
    for problem, hint in _problems(**pair):
        raise RotationZooError(problem, hint)
    return pair


def _read(path: Path) -> list[RotationFile]:
    """The sides in a file, or a folder of latents."""
    module = next(module for module, takes in IMPORTED.values() if takes(path))
    file: list[RotationFile] = import_module(f"rotationzoo.engines.formats.{module}").read(path)
    return file


def _pair_of(files: list[RotationFile]) -> Files:
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
            hint = "give both: keys and values have rotations of their own"
            raise RotationZooError(f"there is no file for the {side}s", hint)
    return {side: sides[side] for side in SIDES}


def _pair_in(folder: Path) -> list[Path]:
    """The only key file and the only value file in a folder."""
    names = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name))
    letters = [name[0] for name in names]
    if letters == ["k", "v"]:
        return [folder / name for name in names]
    if len(letters) > len(set(letters)):
        several = f"{folder} holds several pairs: {', '.join(names)}"
        raise RotationZooError(several, hint="name the two files")
    only = f", only {names[0]}" if names else ""
    hint = "give the two files, such as k_rotation_qqt_r_h_pbr.pt and v_rotation_sst_r_h_pbr.pt"
    raise RotationZooError(f"{folder} holds no pair of rotation files{only}", hint)


def _problems(key: RotationFile, value: RotationFile) -> Iterator[tuple[str, str]]:
    """Each reason why two files are no pair of orthogonal matrices for the same layers, and what to
    do about it."""
    # SGLang's own calibration replaces a pair file by file, and marks the folder meanwhile.
    for pending in key.path.parent.glob(".oscar_*.pending.json"):
        written = "a pair that is being written, or was left half-written"
        finish = "let the server that writes it finish, or remove that file"
        yield f"{pending.parent} holds {written} ({pending.name})", finish
    for file in (key, value):
        check_matrices(file)
    matrices, others = key.content.rotation, value.content.rotation
    for layer in sorted(matrices.keys() ^ others.keys()):
        lacking = value if layer in matrices else key
        yield f"{lacking.path.name} has no layer {layer}, and the other side has", _FETCH_AGAIN
    both = f"{key.path.name} and {value.path.name}"
    for name in _SHARED:
        if key.calibration.get(name) != value.calibration.get(name):
            yield f"{both} do not belong together: their {name} differs", _FETCH_AGAIN
    # Only data-free rotations may be the same for keys and values.
    _, composition = describe(key)
    if composition not in DATA_FREE and all(torch.equal(matrices[i], others[i]) for i in matrices):
        yield f"{both} hold the same matrices", _FETCH_AGAIN


def find_geometry(files: Files, model: str, revision: str | None) -> tuple[Source, Geometry]:
    """The named model and its geometry. Raises `RotationZooError` for files that do not fit it, and
    `UnsupportedModel` for one whose geometry its config does not tell."""
    first, source = next(iter(files.values())), find(model, revision)
    geometry = geometry_on_meta(loading.on_meta(loading.load_config(source), source.name))
    if geometry is None:
        unknown = f"what {model} caches shows only with its weights"
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
        changed = f"changes what {model} computes: {centering.reason(moved)}"
        hint = "import files that were made without a key mean"
        raise RotationZooError(f"{first.path.name} centers keys, which {changed}", hint)
    return source, geometry


def _check_model(model: str, source: Source, file: RotationFile) -> None:
    """Raise `RotationZooError` if the file states another model than the user's."""
    stated = file.calibration
    config, weights = stated.get("config_sha256"), stated.get("weights_fingerprint")
    named = str(stated.get("model") or stated.get("model_path") or "")
    theirs, ours = (path.rstrip("/").rsplit("/", 1)[-1].lower() for path in (named, model))
    # Names are compared only for hub models: a local folder may have any name.
    other_name = source.revision is not None and theirs not in ("", ours)
    contradicts = config != hash_config(source.folder) if config else other_name
    made = f"{file.path.name} says that it was made for"
    if contradicts:
        hint = f"name that model: --model {named}" if named else _CHECK
        raise RotationZooError(f"{made} {named or 'another config'}, and not for {model}", hint)
    if weights and has_weights(source) and weights != weights_fingerprint(source):
        raise RotationZooError(f"{made} other weights than {model} has", _CHECK)


def _misfits(side: str, file: RotationFile, geometry: Geometry) -> Iterator[str]:
    """Each difference between the layers of a model and those of a file."""
    layers, content = {layer.index: layer for layer in cached_layers(geometry)}, file.content
    for missing in sorted(layers.keys() - content.rotation.keys()):
        yield f"they have no {side} rotation for layer {missing}"
    for extra in sorted(content.rotation.keys() - layers.keys()):
        yield f"they have layer {extra}, which caches no {side}s there"
    for index, layer in layers.items():
        matrix, mean, dim = content.rotation[index], content.mean.get(index), layer.dims.get(side)
        wrong = matrix.shape[-1] != dim or (matrix.ndim == 3 and len(matrix) != layer.kv_heads)
        if mean is not None and mean.ndim == 2:
            wrong |= len(mean) not in (1, layer.kv_heads)  # one mean may serve all heads
        if wrong:
            heads = f"{layer.kv_heads} KV heads with {side}s of {dim}"
            yield f"layer {index} has {heads}, the file {list(matrix.shape)}"
