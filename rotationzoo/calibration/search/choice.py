"""One rotation chosen for each head, with how it was scored."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rotationzoo.linalg.paired import clearly_less

BASELINE = "own"  # as the manifest's record calls the recipe's own rotation


@dataclass
class Choice:
    """A rotation for each head of one side of a layer, and the name of each head's candidate."""

    matrix: torch.Tensor
    """`[H, D, D]` float32."""
    names: list[str]
    scores: torch.Tensor
    """On the held-out texts, `[texts, H]`; less is better."""
    record: dict[str, Any] = field(default_factory=dict)
    """What the manifest says of the choice."""


def choose_better(current: Choice, candidate: Choice) -> Choice:
    """The candidate in the heads where it is clearly better, the current choice in the others."""
    better = clearly_less(candidate.scores, current.scores)
    return pick_by_head([current, candidate], better.long().cpu())


def pick_by_head(choices: Sequence[Choice], which: torch.Tensor) -> Choice:
    """Head by head, the choice of number `which` `[H]`."""
    heads = torch.arange(len(which))
    names = [choices[number].names[head] for head, number in enumerate(which.tolist())]
    matrices = torch.stack([choice.matrix for choice in choices])
    scores = torch.stack([choice.scores for choice in choices])
    return Choice(matrices[which, heads], names, scores[which, :, heads].T)
