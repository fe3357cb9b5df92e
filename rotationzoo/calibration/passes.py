"""Counts the tokens that pass through a model, by what they pass for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo import ranks

OTHER = "checks"
"""The purpose of passes that nothing else claims: a few tokens that show how a model works."""


class Passes:
    """Tokens by purpose, such as `statistics`, of every pass through a model.

    A pass that ends at an early layer counts like a whole one. `tokens` are those of earlier runs
    of the job, to which the passes are added.
    """

    def __init__(self, tokens: dict[str, int] | None = None) -> None:
        self.tokens = {} if tokens is None else tokens
        self._purpose = OTHER

    @contextmanager
    def counting(self, model: PreTrainedModel) -> Iterator[None]:
        """Count the passes through a model while the block is open."""
        # The embedding, because a head that predicts from what a decoder has returned before calls
        # a decoder that computes nothing.
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, torch.nn.Module)
        hook = embedding.register_forward_pre_hook(self._count)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def of(self, purpose: str) -> Iterator[None]:
        """Count what passes inside the block for a purpose."""
        outer, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = outer

    def of_all(self) -> dict[str, int]:
        """The tokens by purpose of all processes that `ranks` joins, which all call this."""
        totals: dict[str, int] = {}
        counts = {purpose: torch.tensor(count) for purpose, count in self.tokens.items()}
        for part in ranks.gather([{OTHER: torch.tensor(0), **counts}]):
            for purpose, count in part.items():
                totals[purpose] = totals.get(purpose, 0) + int(count)
        return {purpose: count for purpose, count in totals.items() if count}

    def _count(self, module: torch.nn.Module, args: Any) -> None:
        count = self.tokens.get(self._purpose, 0)
        self.tokens[self._purpose] = count + (args[0].numel() if args else 0)
