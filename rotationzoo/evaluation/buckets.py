"""Buckets of context lengths: a report shows in them how an arm's cost grows with the context."""

from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Buckets:
    """Ranges of positions, one after another."""

    edges: tuple[int, ...]
    """Ascending positions; a bucket begins at its edge and ends before the next."""

    @classmethod
    def between(cls, start: int, length: int) -> "Buckets":
        """Buckets from `start` to `length`; the edges between them are powers of two."""
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
        """First position, and the one after the last, of each bucket."""
        return list(pairwise(self.edges))

    def one_hot(self, positions: torch.Tensor) -> torch.Tensor:
        """`[P, buckets]` float64: 1 where one of the positions `[P]` lies in a bucket."""
        edges = torch.tensor(self.edges)
        inside = (positions[:, None] >= edges[:-1]) & (positions[:, None] < edges[1:])
        return inside.double()
