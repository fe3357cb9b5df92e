"""Finding the rotation files to import: files that the user names, or the one pair in a folder."""

import re
from collections.abc import Sequence
from pathlib import Path

from rotationzoo.engines.formats import mlx, oscar_pt_reader
from rotationzoo.engines.formats.oscar_pt import markers
from rotationzoo.engines.rotation_file import Pair, RotationFile
from rotationzoo.errors import RotationZooError
from rotationzoo.rotations import SIDES

# The default names of `.pt` and MLX files. A GGUF file is found only if the user names it.
_NAME = re.compile(r"[kv]_(rotation|perhead)\w*\.(pt|safetensors)")


def gather_pair(files: Sequence[Path]) -> Pair:
    """Read the key side and the value side from the given files, or from a folder with one pair.

    Raises `RotationZooError` if a side is missing, present twice, unidentified, damaged, or being
    written by another process.
    """
    paths = [path.expanduser() for path in files]
    if len(paths) == 1 and paths[0].is_dir():
        paths = _pair_in(paths[0])
    for path in paths:
        if not path.exists():
            raise RotationZooError(
                f"there is no file {path}",
                hint="give the two rotation files, or the folder that holds them",
            )
    pair = _pair_of([file for path in paths for file in _read_file(path)])
    _check_whole(pair)
    return pair


def _read_file(path: Path) -> list[RotationFile]:
    """The sides in one file. A GGUF file holds both, any other file one."""
    if path.suffix == ".safetensors":
        return [mlx.read_safetensors(path)]
    if path.suffix == ".gguf":
        from rotationzoo.engines.formats.gguf_file import read_gguf

        return read_gguf(path)
    return [oscar_pt_reader.read_pt(path)]


def _pair_of(files: list[RotationFile]) -> Pair:
    sides: dict[str, RotationFile] = {}
    for file in files:
        if file.side is None:
            raise RotationZooError(
                f"nothing says whether {file.path.name} holds keys or values",
                hint="rename it to start with k_ or v_",
            )
        if file.side in sides:
            first = sides[file.side].path.name
            raise RotationZooError(f"{first} and {file.path.name} both hold {file.side}s")
        sides[file.side] = file
    for side in SIDES:
        if side not in sides:
            raise RotationZooError(
                f"there is no file for the {side}s",
                hint="give both: keys and values have rotations of their own",
            )
    return Pair(sides["key"], sides["value"])


def _check_whole(pair: Pair) -> None:
    """Raise `RotationZooError` for a half-written pair.

    SGLang's own calibration replaces a pair file by file, and marks it meanwhile.
    """
    _, pending, _ = markers(pair.key.path, pair.value.path)
    if pending.exists():
        raise RotationZooError(
            f"{pending.parent} holds a pair that is being written, or was left half-written "
            f"({pending.name})",
            hint="let the server or export that wrote it finish, or run it again",
        )


def _pair_in(folder: Path) -> list[Path]:
    """The only key file and the only value file in a folder."""
    names = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name))
    keys = [name for name in names if name.startswith("k")]
    values = [name for name in names if name.startswith("v")]
    if len(keys) > 1 or len(values) > 1:
        raise RotationZooError(
            f"{folder} holds several pairs: {', '.join(names)}", hint="name the two files"
        )
    if not keys or not values:
        only = f", only {', '.join(names)}" if names else ""
        raise RotationZooError(
            f"{folder} holds no pair of rotation files{only}",
            hint="give the two files, "
            "such as k_rotation_qqt_r_h_pbr.pt and v_rotation_sst_r_h_pbr.pt",
        )
    return [folder / keys[0], folder / values[0]]
