"""The compositions that a recipe may ask for, each with the names of its factors.

Servers read recipes and multiply nothing: `linalg.compositions` has the factors.
"""

AROUND_EIGENBASIS = {
    "plain": "",
    "br": "permutation",
    "r_h": "hadamard",
    "r_h_pbr": "hadamard permutation",
    # Descending eigenvectors, as in published per-head files and a llama.cpp fork's calibrator.
    "rdesc_h": "descending hadamard",
    "rdesc_h_br": "descending hadamard reversal",
    # Permuting before a block-diagonal Hadamard matrix sends strong directions to different groups.
    "r_pbr_hblock": "permutation block_hadamard",
}
"""Name -> the factors right of the eigenbasis."""
FIXED = {"identity": "", "hadamard": "hadamard"}
"""Name -> the factors of a matrix that is the same for every model."""
DATA_FREE = (*FIXED, "random")
"""Compositions without an eigenbasis. Only `random` uses a seed."""
COMPOSITIONS = (*AROUND_EIGENBASIS, *DATA_FREE)
"""The name of every composition that a recipe may ask for."""
GIVEN = "given"
"""The composition of matrices that someone else computed, whose factors are unknown."""


def needs_statistics(composition: str) -> bool:
    """Whether the composition contains an eigenbasis, and therefore needs statistics."""
    return composition in AROUND_EIGENBASIS
