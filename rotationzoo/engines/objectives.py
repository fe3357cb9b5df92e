"""Objective names in OSCAR's files, such as `qqt_r_h_pbr`: the statistic, then the composition."""

import re
from dataclasses import dataclass

from rotationzoo.engines.rotation_file import RotationFile
from rotationzoo.linalg import compositions
from rotationzoo.linalg.compositions import COMPOSITIONS, DATA_FREE
from rotationzoo.recipe import Recipe

STATISTICS = {"qqt": "query", "ktk": "key", "sst": "key_energy", "vtv": "value"}
"""OSCAR's word for a statistic -> the recipe's word.

OSCAR has no word for the exact `output` statistic, so it is written as `sst` too. Files that
rotationzoo writes state the exact one under `calibration`.
"""
_WORDS = {statistic: word for word, statistic in STATISTICS.items()} | {"output": "sst"}
# The composition that a name means in a file whose eigenvectors are in descending order.
_DESCENDING = {"r_h_pbr": "rdesc_h_br", "r_h": "rdesc_h"}
# These names state neither statistic nor composition, so `describe` assumes OSCAR's usual ones.
_VERSION_3 = ("oscar2_perhead", "oscar2_center", "oscar2_v_pre_wo")


@dataclass(frozen=True)
class Described:
    """A file's statement about its matrices, in a recipe's words."""

    statistic: str | None
    """None if the file states none, or needs none."""
    composition: str
    """`given` if the file names no known composition."""


def objective_of(recipe: Recipe, side: str) -> str:
    """The objective name of one side of a recipe's rotations."""
    if not recipe.has_eigenbasis:
        return recipe.composition
    statistic = recipe.key_statistic if side == "key" else recipe.value_statistic
    return f"{_WORDS[statistic]}_{recipe.composition}"


def describe(file: RotationFile) -> Described:
    """The statistic and the composition of a file, from its objective and its `calibration`
    entry."""
    name = file.content.objective
    said = file.calibration.get(f"{file.side}_statistic")
    statistic = said if said in _WORDS else None
    if parts := re.fullmatch(r"(qqt|ktk|sst|vtv)_(\w+?)(?:_perhead|_center)?", name):
        composition = _known(parts[2])
        if file.descending:
            composition = _DESCENDING.get(composition, compositions.GIVEN)
        return Described(statistic or STATISTICS[parts[1]], composition)
    if name == "cov_eig_hadamard_perhead":  # the published fitter for one rotation per KV head
        return Described(file.side, "rdesc_h")
    if name in _VERSION_3:
        usual = "query" if file.side == "key" else "key_energy"
        return Described(statistic or usual, _known(file.calibration.get("composition", "r_h_pbr")))
    # Data-free names may have a suffix for their grouping, a mean or a side.
    plain = re.sub(r"_perhead$|_center$|-[kv]$", "", name)
    return Described(None, plain if plain in DATA_FREE else compositions.GIVEN)


def _known(composition: str) -> str:
    return composition if composition in COMPOSITIONS else compositions.GIVEN
