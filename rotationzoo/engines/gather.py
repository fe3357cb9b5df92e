"""Finding the rotation files to import: files that the user names, the one pair in a folder, or a
folder of latents; and the checks that they belong together."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rotationzoo.engines.formats import oscar_pt_reader
from rotationzoo.engines.objectives import describe
from rotationzoo.engines.rotation_file import RotationFile, check_matrices, normalise
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.composition_table import DATA_FREE
from rotationzoo.rotations import LATENT, SIDES

Files = dict[str, RotationFile]
"""Side -> its file: `key` and `value`, or `latent`."""

# The default names of `.pt` files. A GGUF file is found only if the user names it.
_NAME = re.compile(r"[kv]_(rotation|perhead)\w*\.pt")
# Entries of `calibration` that agree in both files of one run.
_SHARED = ("generation_id", "config_sha256", "model")
_FETCH_AGAIN = "fetch both again"


def gather_files(files: Sequence[Path], transposed: bool = False) -> Files:
    """Read the key side and the value side from the given files, or from a folder with one pair; or
    the latents from a folder with a file for each layer.

    The matrices are orthogonal and applied as `x @ R`, also if the files hold them `transposed`.
    Raises `RotationZooError` if a side is missing, present twice, unidentified, damaged, or being
    written by another process, and if two files do not belong together.
    """
    paths = [path.expanduser() for path in files]
    if len(paths) == 1 and paths[0].is_dir():
        if oscar_pt_reader.latent_files(paths[0]):
            latents = normalise(oscar_pt_reader.read_latents(paths[0]), transposed)
            check_matrices(latents)
            return {LATENT: latents}
        paths = _pair_in(paths[0])
    pair = _pair_of([file for path in paths for file in _read_file(path)])
    pair = {side: normalise(file, transposed) for side, file in pair.items()}
    for problem, hint in _problems(**pair):
        raise RotationZooError(problem, hint)
    return pair


def _read_file(path: Path) -> list[RotationFile]:
    """The sides in one file. A GGUF file holds both, any other file one."""
    if path.suffix == ".gguf":
        from rotationzoo.engines.formats.gguf_file import read_gguf

        return read_gguf(path)
    return [oscar_pt_reader.read_pt(path)]


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
    free = describe(key).composition in DATA_FREE
    if not free and all(torch.equal(matrices[i], others[i]) for i in matrices):
        yield f"{both} hold the same matrices", _FETCH_AGAIN
