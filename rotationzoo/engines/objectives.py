"""Objective names in OSCAR's files, such as `qqt_r_h_pbr`: the statistic, then the composition."""

import re
from dataclasses import dataclass

from rotationzoo.engines.rotation_file import RotationFile
from rotationzoo.linalg.composition_table import COMPOSITIONS, DATA_FREE, GIVEN
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LATENT

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
# What OSCAR's `compute_mla_oscar_rotation.py` calls a folder: the eigenbasis of the second moment
# of latents, a permutation, and Hadamard matrices over groups of so many channels.
_OF_LATENTS = re.compile(r"c_kv_rcov_phblock_g([1-9]\d{0,5})")


@dataclass(frozen=True)
class Described:
    """A file's statement about its matrices, in a recipe's words."""

    statistic: str | None
    """None if the file states none, or needs none."""
    composition: str
    """`given` if the file names no known composition."""
    group_size: int | None = None
    """Channels that share a scale; None if the file does not say."""


def objective_of(recipe: Recipe, side: str) -> str:
    """The objective name of one side of a recipe's rotations."""
    if not recipe.has_eigenbasis:
        return recipe.composition
    statistic = recipe.key_statistic if side == "key" else recipe.value_statistic
    return f"{_WORDS[statistic]}_{recipe.composition}"


def describe(file: RotationFile) -> Described:
    """The statistic, the composition and the group size of a file, from its objective and its
    `calibration` entry. A folder of latents says them by its name alone."""
    name, group = file.content.objective, file.calibration.get("group_size")
    if file.side == LATENT:
        fitted = _OF_LATENTS.fullmatch(name)
        return Described(None, "r_pbr_hblock", int(fitted[1])) if fitted else Described(None, GIVEN)
    group_size = group if isinstance(group, int) and group > 0 else None
    return Described(*_statistic_and_composition(file, name), group_size)


def _statistic_and_composition(file: RotationFile, name: str) -> tuple[str | None, str]:
    said = file.calibration.get(f"{file.side}_statistic")
    statistic = said if said in _WORDS else None
    if parts := re.fullmatch(r"(qqt|ktk|sst|vtv)_(\w+?)(?:_perhead|_center)?", name):
        composition = _known(parts[2])
        if file.descending:
            composition = _DESCENDING.get(composition, GIVEN)
        return statistic or STATISTICS[parts[1]], composition
    if name == "cov_eig_hadamard_perhead":  # the published fitter for one rotation per KV head
        return file.side, "rdesc_h"
    if name in _VERSION_3:
        usual = "query" if file.side == "key" else "key_energy"
        return statistic or usual, _known(file.calibration.get("composition", "r_h_pbr"))
    # Data-free names may have a suffix for their grouping, a mean or a side.
    plain = re.sub(r"_perhead$|_center$|-[kv]$", "", name)
    return None, plain if plain in DATA_FREE else GIVEN


def _known(composition: str) -> str:
    return composition if composition in COMPOSITIONS else GIVEN
