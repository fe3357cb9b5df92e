"""Buckets of context lengths, by which a report shows how an arm's cost grows with context."""

from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Buckets:
    """Consecutive ranges of positions."""

    edges: tuple[int, ...]
    """Ascending positions. Each bucket begins at one edge and ends just before the next."""

    @classmethod
    def between(cls, start: int, length: int) -> "Buckets":
        """Buckets that cover `start` to `length`, with the powers of two in between as edges."""
        edges = [start]
        # The first power of two above the start.
        power = 1 << start.bit_length()
        while power < length:
            edges.append(power)
            power *= 2
        return cls((*edges, length))

    @property
    def start(self) -> int:
        """The first position of the first bucket."""
        return self.edges[0]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """For each bucket, its first position and the position after its last."""
        return list(pairwise(self.edges))

    def one_hot(self, positions: torch.Tensor) -> torch.Tensor:
        """Membership `[P, buckets]`, float64: 1 where a position of `[P]` lies in the bucket."""
        edges = torch.tensor(self.edges)
        inside = (positions[:, None] >= edges[:-1]) & (positions[:, None] < edges[1:])
        return inside.double()
