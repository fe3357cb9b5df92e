"""The inputs of a search, and the split of its text into what chooses and what tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.passes import Passes
from rotationzoo.codec import int2
from rotationzoo.linalg.moments import Statistics
from rotationzoo.model.geometry import Geometry
from rotationzoo.recipe import Recipe, Search
from rotationzoo.rotations import Rotations

_TESTING = 4  # one in so many held-out rows tests the winner


@dataclass(frozen=True)
class SearchTask:
    """The inputs of a search."""

    model: PreTrainedModel
    geometry: Geometry
    recipe: Recipe
    statistics: Statistics
    baseline: Rotations
    """The rotations of the recipe without its search, as `fit` makes them."""
    fitted: Sequence[torch.Tensor]
    """Token rows `[T]` that the statistics were collected on; rotations are learned from them."""
    held_out: Sequence[torch.Tensor]
    """Token rows that every choice is made on. At least one is longer than the cache's exact
    windows."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """The model's tokenizer, in which prompts are written. Without one, choices are made by the
    model's predictions alone."""
    batch: int = 1
    """Rows per forward pass."""
    passes: Passes = field(default_factory=Passes)
    """Counts the tokens that pass through the model."""

    @property
    def hidden(self) -> int:
        """The width of the model's residual stream."""
        hidden: int = self.model.config.get_text_config(decoder=True).hidden_size
        return hidden

    @property
    def settings(self) -> Search:
        """The recipe's search settings."""
        assert self.recipe.search is not None
        return self.recipe.search

    @property
    def cache(self) -> Cache:
        """The cache in which every candidate is tried."""
        return Cache(int2.FORMATS[self.settings.format], self.recipe.sink, self.recipe.recent)

    @property
    def choosing(self) -> list[torch.Tensor]:
        """The held-out rows that candidates are chosen on: those that read quantized positions,
        but for the last quarter."""
        rows = self._long_rows
        return rows[: -self._testing] if self._testing else rows

    @property
    def testing(self) -> list[torch.Tensor]:
        """The held-out rows that test the winner: none of `choosing`, unless there is only one."""
        return self._long_rows[-self._testing :]

    @property
    def _testing(self) -> int:
        """How many rows test the winner; 0 if a single row must do both."""
        return count_testing(len(self._long_rows))

    @property
    def _long_rows(self) -> list[torch.Tensor]:
        return [row for row in self.held_out if len(row) > self.cache.first_quantized]


def count_testing(rows: int) -> int:
    """How many of so many held-out rows test the winner, and choose nothing; 0 if a single row must
    do both."""
    return 0 if rows == 1 else max(1, rows // _TESTING)
