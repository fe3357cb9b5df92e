"""The rotation chosen for each head, with its scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rotationzoo.linalg.paired import clearly_less

BASELINE = "own"  # the manifest's name for the recipe's own rotation


@dataclass
class Choice:
    """One rotation for each head of one side of a layer, with the name of each head's candidate."""

    matrix: torch.Tensor
    """The rotations `[H, D, D]`, float32."""
    names: list[str]
    scores: torch.Tensor
    """Scores on the held-out texts, `[texts, H]`; lower is better."""
    record: dict[str, Any] = field(default_factory=dict)
    """The manifest's record of the choice."""


def choose_better(current: Choice, candidate: Choice) -> Choice:
    """Take the candidate in heads where it is clearly better, and the current choice in the
    others."""
    better = clearly_less(candidate.scores, current.scores)
    return pick_by_head([current, candidate], better.long().cpu())


def pick_by_head(choices: Sequence[Choice], which: torch.Tensor) -> Choice:
    """Pick for each head the choice whose number `which` `[H]` gives."""
    heads = torch.arange(len(which))
    names = [choices[number].names[head] for head, number in enumerate(which.tolist())]
    matrices = torch.stack([choice.matrix for choice in choices])
    scores = torch.stack([choice.scores for choice in choices])
    # Two index tensors around a slice put heads first, `[H, texts]`, so the scores are transposed.
    return Choice(matrices[which, heads], names, scores[which, :, heads].T)
