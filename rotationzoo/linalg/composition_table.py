"""The compositions of recipes, with the names of their factors. It imports no torch."""

AROUND_EIGENBASIS = {
    "plain": "",
    "br": "permutation",
    "r_h": "hadamard",
    "r_h_pbr": "hadamard permutation",
    # A permutation before a block-diagonal Hadamard matrix spreads strong directions over groups.
    "r_pbr_hblock": "permutation block_hadamard",
}
"""Name -> the factors right of the eigenbasis."""
FIXED = {"identity": "", "hadamard": "hadamard"}
"""Name -> the factors of a matrix that is the same for every model."""
DATA_FREE = (*FIXED, "random")
"""Compositions without an eigenbasis. Only `random` uses a seed."""
COMPOSITIONS = (*AROUND_EIGENBASIS, *DATA_FREE)
GIVEN = "given"
"""The composition of imported matrices, whose factors are unknown."""


def needs_statistics(composition: str) -> bool:
    """Whether the composition contains an eigenbasis, and therefore needs statistics."""
    return composition in AROUND_EIGENBASIS
