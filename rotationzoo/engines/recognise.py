"""Recognizing the orientation and the composition of rotation files from their matrices.

RoPE leaves a mark in second moments of queries and keys: both channels of a RoPE pair have nearly
the same energy. Values carry no such mark. It therefore tells keys from values, and a matrix from
its transpose, even in a file that names no model. It becomes visible only if the composition is
undone in the way it was made, from matrices that are not transposed.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch

from rotationzoo.engines.base import SideMatrices
from rotationzoo.engines.objectives import describe
from rotationzoo.engines.rotation_file import RotationFile
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.composition_table import COMPOSITIONS, DATA_FREE, GIVEN, needs_statistics
from rotationzoo.linalg.compositions import recover_basis

_FEWEST = 256  # pairs of channels over all matrices: with fewer, chance could look like a mark
_TINY = 1e-300  # avoids 0 / 0 for two channels without energy


def pair_contrast(second_moment: torch.Tensor) -> float | None:
    """How much energies differ within RoPE pairs of second moments `[N, D, D]`, divided by how much
    they differ between unrelated channels.

    It is about 1 without the mark. On six published pairs of files it was .01 to .54 for keys, .86
    and more for values and for transposed keys, and .68 and more for keys with a Hadamard matrix
    undone as another composition.

    The result is the smallest contrast over the known layouts: RoPE pairs the two halves of all, of
    half, or of a quarter of the channels, or it pairs neighbours. None if there are too few pairs
    to tell.
    """
    energy = second_moment.diagonal(dim1=-2, dim2=-1).double()
    dim = energy.shape[-1]
    halves = [rotated // 2 for rotated in (dim, dim // 2, dim // 4)]
    layouts = [(energy[..., :half], energy[..., half : 2 * half]) for half in halves]
    layouts.append((energy[..., 0::2], energy[..., 1::2]))
    contrasts = [_rope_contrast(first, second) for first, second in layouts]
    return min((contrast for contrast in contrasts if contrast is not None), default=None)


def _rope_contrast(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """The contrast of channels `[N, pairs]` and their partners, or None if they are too few."""
    if first.numel() < _FEWEST:
        return None
    # Rolling the partners gives each channel an unrelated one to compare with.
    partners = second, second.roll(max(1, first.shape[-1] // 4), -1)
    paired, unrelated = (
        ((first - other).abs() / (first + other).abs().clamp(min=_TINY)).median()
        for other in partners
    )
    return (paired / unrelated).item()


# Thresholds on the contrast of RoPE pairs. Up to _MARK the mark is there; from _NO_MARK on it is
# not. A composition that the file itself states is believed up to _STATED_MARK: published keys have
# .01 to .54 in their own composition, and .56 and more in others.
_MARK, _STATED_MARK, _NO_MARK = 0.35, 0.6, 0.75
_CALIBRATED = [name for name in COMPOSITIONS if needs_statistics(name)]


def recognise_composition(
    key: RotationFile, value: RotationFile, group_size: int | None
) -> tuple[str, list[str]]:
    """The composition, and remarks on it.

    What the files state is compared with the mark of RoPE on the statistic inside the keys. Raises
    `RotationZooError` if keys and values are swapped or the matrices are stored transposed.
    """
    stated = {describe(file).composition for file in (key, value)}
    if len(stated) > 1:
        names = " and ".join(sorted(stated))
        return GIVEN, [f"keys and values have different compositions: {names}"]
    (composition,) = stated
    if composition in DATA_FREE:
        return composition, []
    unnamed = composition == GIVEN
    notes = ["the files name no composition that is known"] if unnamed else []
    # The clearest mark under any composition, with the matrices as they are and transposed.
    turned = {layer: matrix.mT for layer, matrix in key.content.rotation.items()}
    transposed = replace(key.content, rotation=turned)
    clearest = _least_contrast(key.content, _CALIBRATED, group_size)
    clearest_transposed = _least_contrast(transposed, _CALIBRATED, group_size)
    if clearest is None or clearest_transposed is None:
        too_small = "too small a model to recognise orientation and composition from the matrices"
        return composition, [*notes, too_small]

    candidates, limit = (_CALIBRATED, _MARK) if unnamed else ([composition], _STATED_MARK)
    # The contrast cannot tell which end of the eigenvectors has the largest eigenvalue. RoPE turns
    # the strongest directions slowly, so they carry the mark least, and it is often clearer with
    # the eigenvalues reversed. A stated composition is therefore tried in both orders.
    contrast, value_contrast = (
        _least_contrast(file.content, candidates, group_size, both_orders=not unnamed)
        for file in (key, value)
    )
    assert contrast is not None, "the keys have as many RoPE pairs in every composition"
    if contrast <= limit and contrast <= clearest_transposed:
        return composition, notes
    unmarked = contrast >= _NO_MARK
    if unmarked and value_contrast is not None and value_contrast <= limit:
        raise RotationZooError(
            f"keys and values are swapped: {value.path.name} bears the mark of RoPE and "
            f"{key.path.name} does not",
            hint="give the files their right names",
        )
    # If the stated composition shows no mark at all, a weaker one elsewhere contradicts it.
    contradiction = _STATED_MARK if unmarked else _MARK
    if clearest_transposed <= contradiction and clearest_transposed < clearest:
        raise RotationZooError(
            f"{key.path.name} holds its matrices transposed: R is its M^T",
            hint="add --transposed, or leave it out if you gave it",
        )
    if clearest <= contradiction:
        return GIVEN, [f"the files say {composition}, and the matrices are of another composition"]
    unconfirmed = f"could not be confirmed (contrast of RoPE pairs {contrast:.2f})"
    return composition, [*notes, f"orientation and composition {unconfirmed}"]


def _least_contrast(
    side: SideMatrices, candidates: Sequence[str], group_size: int | None, both_orders: bool = False
) -> float | None:
    """The smallest contrast of RoPE pairs in `U diag(lambda) U^T`, where U is recovered by undoing
    each of the candidate compositions.

    If a file has no eigenvalues, their ranks 0, 1, ... stand in for them. With `both_orders`, they
    are also tried in reverse. None if there are too few pairs.
    """
    contrasts = []
    for reverse, composition in product((False, True)[: 1 + both_orders], candidates):
        moments: dict[int, list[torch.Tensor]] = {}  # by head dimension, which may vary by layer
        for layer, matrix in side.rotation.items():
            dim = matrix.shape[-1]
            basis = recover_basis(matrix.reshape(-1, dim, dim), composition, group_size or dim)
            eigenvalues = side.eigenvalues.get(layer, torch.arange(dim)).double().reshape(-1, dim)
            ordered = eigenvalues.sort(-1, descending=reverse).values
            moments.setdefault(dim, []).append(basis @ torch.diag_embed(ordered) @ basis.mT)
        of_dims = [pair_contrast(torch.cat(of_dim)) for of_dim in moments.values()]
        # The mark must show at every head dimension, so the least clear one counts.
        contrasts.append(max((each for each in of_dims if each is not None), default=None))
    return min((contrast for contrast in contrasts if contrast is not None), default=None)
