"""Rotation files that others made: found, checked, and recognised from what is in them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rotationzoo.calibration.claim import ORTHOGONAL_IMPORTED
from rotationzoo.engines.base import SIDES, WORDS, RotationFile, Side, check_regular
from rotationzoo.engines.formats import llama_cpp, mlx, oscar_pt, sglang
from rotationzoo.engines.rope_signature import pair_contrast
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg import compositions
from rotationzoo.linalg.compositions import DATA_FREE

# Contrast of RoPE pairs (rope.py): below the first there is a mark, above the last there is none.
# What a file says of itself is believed up to the second: published keys have .01 to .54 in their
# own composition, and .56 and more in others.
_MARK, _STATED_MARK, _NO_MARK = 0.35, 0.6, 0.75
# What the names mean where eigenvectors are in descending order.
_DESCENDING = {"r_h_pbr": "rdesc_h_br", "r_h": "rdesc_h"}


@dataclass(frozen=True)
class Described:
    """What a file says its matrices are."""

    statistic: str | None
    composition: str


def gather(files: Sequence[Path]) -> tuple[RotationFile, RotationFile]:
    """The key and the value side in the given files, or in a folder that holds one pair. Raises
    `RotationZooError`."""
    paths = [path.expanduser() for path in files]
    if len(paths) == 1 and paths[0].is_dir():
        paths = _pair_in(paths[0])
    for path in paths:
        if not path.exists():
            raise RotationZooError(
                f"there is no file {path}",
                hint="give the two rotation files, or the folder that holds them",
            )
        check_regular(path)
    read = [side for path in paths for side in _read(path)]
    found: dict[str, RotationFile] = {}
    for side in read:
        if side.side is None:
            raise RotationZooError(
                f"nothing says whether {side.path.name} holds keys or values",
                hint="rename it to start with k_ or v_",
            )
        if side.side in found:
            raise RotationZooError(
                f"{found[side.side].path.name} and {side.path.name} both hold {side.side}s"
            )
        found[side.side] = side
    for name in SIDES:
        if name not in found:
            raise RotationZooError(
                f"there is no file for the {name}s",
                hint="give both: keys and values have rotations of their own",
            )
    _, pending, _ = sglang.markers(found["key"].path, found["value"].path)
    if pending.exists():
        raise RotationZooError(
            f"{pending.parent} holds a pair that somebody is writing, or stopped writing half-way ({pending.name})",
            hint="let the server or export that wrote it finish, or run it again",
        )
    return found["key"], found["value"]


def check(key: RotationFile, value: RotationFile, described: Mapping[str, Described]) -> None:
    """Raise `RotationZooError` unless both sides are orthogonal matrices of the same layers, and
    what their names say."""
    for side in (key, value):
        check_matrices(side)
    _check_pair(key, value)
    _check_names(key, value, described)


def describe(side: RotationFile) -> Described:
    """Statistic and composition in our words, from what a file says."""
    said, content = side.calibration, side.content.objective
    statistic = said.get(f"{side.side}_statistic")
    statistic = statistic if statistic in WORDS.values() or statistic == "output" else None
    if parts := re.fullmatch(r"(qqt|ktk|sst|vtv)_(\w+?)(?:_perhead|_center)?", content):
        composition = parts[2] if parts[2] in compositions.COMPOSITIONS else compositions.GIVEN
        if side.descending:
            composition = _DESCENDING.get(composition, compositions.GIVEN)
        return Described(statistic or WORDS[parts[1]], composition)
    if content == "cov_eig_hadamard_perhead":
        return Described(side.side, "rdesc_h")
    if content in ("oscar2_perhead", "oscar2_center", "oscar2_v_pre_wo"):
        composition = said.get("composition", "r_h_pbr")
        known = composition if composition in compositions.COMPOSITIONS else compositions.GIVEN
        return Described(statistic or ("query" if side.side == "key" else "key_energy"), known)
    plain = re.sub(r"_perhead$|_center$|-[kv]$", "", content)
    if plain in DATA_FREE:
        return Described(None, plain)
    return Described(None, compositions.GIVEN)


def recognise(
    key: RotationFile,
    value: RotationFile,
    described: Mapping[str, Described],
    group_size: int | None,
) -> tuple[str, list[str]]:
    """The composition, and remarks: what the files say, held against the mark of RoPE on the
    statistic inside the keys.

    Raises `RotationZooError` for keys and values swapped and for matrices that are stored
    transposed.
    """
    said = {described[side].composition for side in SIDES}
    if len(said) > 1:
        return compositions.GIVEN, [
            f"keys and values have different compositions: {' and '.join(sorted(said))}"
        ]
    (composition,) = said
    if composition in DATA_FREE:
        return composition, []
    unnamed = composition == compositions.GIVEN
    notes = ["the files name no composition that is known"] if unnamed else []
    known = [name for name in compositions.COMPOSITIONS if compositions.needs_statistics(name)]
    clearest, clearest_turned = (_mark(keys, known, group_size) for keys in (key, _transposed(key)))
    if clearest is None or clearest_turned is None:
        return composition, [
            *notes,
            "too small a model to recognise orientation and composition from the matrices",
        ]
    stated, limit = (known, _MARK) if unnamed else ([composition], _STATED_MARK)
    mark, value_mark = (
        _mark(side, stated, group_size, reverse=not unnamed) for side in (key, value)
    )
    assert mark is not None, "as many pairs as before"
    if mark <= limit and mark <= clearest_turned:
        return composition, notes
    if mark >= _NO_MARK and value_mark is not None and value_mark <= limit:
        raise RotationZooError(
            f"keys and values are swapped: {value.path.name} bears the mark of RoPE and {key.path.name} does not",
            hint="give the files their right names",
        )
    contradicts = _STATED_MARK if mark >= _NO_MARK else _MARK
    if clearest_turned <= contradicts and clearest_turned < clearest:
        raise RotationZooError(
            f"{key.path.name} holds its matrices transposed: R is its M^T",
            hint="add --transposed, or leave it out if you gave it",
        )
    if clearest <= contradicts:
        return compositions.GIVEN, [
            f"the files say {composition}, and the matrices are of another composition"
        ]
    return composition, [
        *notes,
        f"orientation and composition could not be confirmed (contrast of RoPE pairs {mark:.2f})",
    ]


def _transposed(side: RotationFile) -> RotationFile:
    matrices = {layer: matrix.mT for layer, matrix in side.content.rotation.items()}
    return replace(side, content=replace(side.content, rotation=matrices))


def _mark(
    side: RotationFile, compositions: Sequence[str], group_size: int | None, reverse: bool = False
) -> float | None:
    """The least contrast of RoPE pairs of the statistic inside rotations, were they of one of these
    compositions; with `reverse` also of one with the eigenvectors in reverse.

    Which end of the eigenvectors has the largest eigenvalue the contrast does not tell: the
    strongest directions turn slowly and bear the mark least, so that with eigenvalues in reverse it
    is often clearer.
    """
    contrasts = [_contrast(side.content, name, group_size, False) for name in compositions]
    if reverse:
        contrasts += [_contrast(side.content, name, group_size, True) for name in compositions]
    known = [contrast for contrast in contrasts if contrast is not None]
    return min(known) if known else None


def _contrast(side: Side, composition: str, group_size: int | None, reverse: bool) -> float | None:
    by_dim: dict[int, list[torch.Tensor]] = {}
    for layer, matrix in side.rotation.items():
        dim = matrix.shape[-1]
        if dim % (group_size or dim):
            return None
        basis = compositions.recover_basis(
            matrix.reshape(-1, dim, dim), composition, group_size or dim
        )
        weights = side.eigenvalues.get(layer, torch.arange(dim)).double().reshape(-1, dim)
        weights = weights.sort(-1, descending=reverse).values
        by_dim.setdefault(dim, []).append(basis @ torch.diag_embed(weights) @ basis.mT)
    contrasts = [pair_contrast(torch.cat(moments)) for moments in by_dim.values()]
    known = [contrast for contrast in contrasts if contrast is not None]
    return max(known) if known else None


def _read(path: Path) -> list[RotationFile]:
    if path.suffix == ".safetensors":
        return [mlx.read(path)]
    return llama_cpp.read(path) if path.suffix == ".gguf" else [oscar_pt.read(path)]


def _pair_in(folder: Path) -> list[Path]:
    """The one file of keys and the one of values in a folder."""
    names = sorted(
        p.name
        for p in folder.iterdir()
        if re.fullmatch(r"[kv]_(rotation|perhead)\w*\.(pt|safetensors)", p.name)
    )
    pair = [[name for name in names if name.startswith(letter)] for letter in "kv"]
    if any(len(side) > 1 for side in pair):
        raise RotationZooError(
            f"{folder} holds several pairs: {', '.join(names)}", hint="name the two files"
        )
    if not all(pair):
        raise RotationZooError(
            f"{folder} holds no pair of rotation files"
            + (f", only {', '.join(names)}" if names else ""),
            hint="give the two files, such as k_rotation_qqt_r_h_pbr.pt and v_rotation_sst_r_h_pbr.pt",
        )
    return [folder / side[0] for side in pair]


def normalise(side: RotationFile, transposed: bool) -> RotationFile:
    """With the matrices the right way round and eigenvalues ascending, float32."""
    content = side.content
    matrices = {
        layer: (m.mT if transposed else m).float().contiguous()
        for layer, m in content.rotation.items()
    }
    notes = [*side.notes, *([f"{side.path.name} was read as transposed"] if transposed else [])]
    if any(matrix.dtype != torch.float32 for matrix in content.rotation.values()):
        notes.append(f"{side.path.name} is not float32; its matrices were converted")
    eigenvalues = {layer: values.float() for layer, values in content.eigenvalues.items()}
    descending = [layer for layer, values in eigenvalues.items() if (values.diff(dim=-1) < 0).any()]
    if descending:
        if any((eigenvalues[layer].diff(dim=-1) > 0).any() for layer in descending):
            raise RotationZooError(
                f"the eigenvalues of layer {descending[0]} in {side.path.name} are in no order"
            )
        eigenvalues = {layer: values.flip(-1) for layer, values in eigenvalues.items()}
        notes.append(
            f"{side.path.name} has its eigenvalues in descending order; they were reversed"
        )
    turned_round = replace(content, rotation=matrices, eigenvalues=eigenvalues)
    return replace(side, content=turned_round, notes=tuple(notes), descending=bool(descending))


def check_matrices(side: RotationFile) -> None:
    """Square, finite and orthogonal, with eigenvalues and means to match."""
    for layer, matrix in side.content.rotation.items():
        what = f"layer {layer} of {side.path.name}"
        if matrix.ndim not in (2, 3) or matrix.shape[-1] != matrix.shape[-2] or not matrix.numel():
            raise RotationZooError(f"{what} is no square matrix, but {list(matrix.shape)}")
        if not torch.isfinite(matrix).all():
            raise RotationZooError(
                f"{what} is not finite", hint="do not use it: its calibration failed"
            )
        error = compositions.orthogonality_error(matrix)
        if not error <= ORTHOGONAL_IMPORTED:
            raise RotationZooError(
                f"{what} is no orthogonal matrix (largest |R R^T - I| {error:.1e})",
                hint="do not use it",
            )
        for name, tensors in (
            ("eigenvalues", side.content.eigenvalues),
            ("k_mean", side.content.mean),
        ):
            vector = tensors.get(layer)
            if vector is None:
                continue
            one_each = vector.shape == matrix.shape[:-1]
            for_heads = (
                name == "k_mean" and vector.ndim <= 2 and vector.shape[-1] == matrix.shape[-1]
            )  # of a shared rotation
            if (
                not (one_each or (for_heads and matrix.ndim == 2))
                or not torch.isfinite(vector).all()
            ):
                raise RotationZooError(
                    f"{what} has {name} that are not finite or not of its shape",
                    hint="do not use it",
                )
            if name == "eigenvalues" and vector.min() < -1e-4 * vector.max().abs():
                raise RotationZooError(
                    f"{what} has negative eigenvalues: no second moment has", hint="do not use it"
                )


def _check_pair(key: RotationFile, value: RotationFile) -> None:
    """The same layers, and not the same matrices."""
    if missing := sorted(key.content.rotation.keys() ^ value.content.rotation.keys()):
        lacking = value if missing[0] in key.content.rotation else key
        raise RotationZooError(
            f"{lacking.path.name} has no layer {missing[0]}, and the other side has",
            hint="fetch both again",
        )
    for name in ("generation_id", "config_sha256", "model"):
        if key.calibration.get(name) != value.calibration.get(name):
            raise RotationZooError(
                f"{key.path.name} and {value.path.name} do not belong together: their {name} differs",
                hint="fetch both again",
            )


def _check_names(
    key: RotationFile, value: RotationFile, described: Mapping[str, Described]
) -> None:
    """No identity or Hadamard matrix under the name of a calibrated one, and no pair of copies."""
    for side in (key, value):
        said = described[side.side or "key"].composition
        honest = said in DATA_FREE and not re.search(r"_(qqt|ktk|sst|vtv)_", side.path.stem)
        for layer, matrix in side.content.rotation.items():
            if (what := _data_free(matrix)) and not honest:
                raise RotationZooError(
                    f"{side.path.name} holds {what} in layer {layer} under the name of a calibrated one",
                    hint="if that is what you want: rotationzoo calibrate MODEL --recipe hadamard (or identity)",
                )
    same = all(
        torch.equal(key.content.rotation[layer], value.content.rotation[layer])
        for layer in key.content.rotation
    )
    if same and described["key"].composition not in DATA_FREE:
        raise RotationZooError(
            f"{key.path.name} and {value.path.name} hold the same matrices", hint="fetch both again"
        )


def _data_free(matrix: torch.Tensor) -> str | None:
    """Whether all of `[.., D, D]` is a permutation or a Hadamard matrix, up to signs and order."""
    size = matrix.abs()
    if ((size < 1e-4) | ((size - 1).abs() < 1e-4)).all():
        return (
            "the identity matrix"
            if torch.equal(matrix.diagonal(dim1=-2, dim2=-1), torch.ones(matrix.shape[:-1]))
            else "a permutation"
        )
    return "a Hadamard matrix" if ((size - matrix.shape[-1] ** -0.5).abs() < 1e-4).all() else None
