"""Which positions of which texts a search samples, and which texts share a forward pass."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rotationzoo.cache.windows import Cache

LEARNING_TOKENS = 2048  # tokens per text whose keys and values are learned from


@dataclass(frozen=True)
class SamplingSettings:
    """What is sampled, and from which texts `[T]`."""

    choosing: Sequence[torch.Tensor]
    """Texts of which queries are sampled, with everything that they read."""
    fitted: Sequence[torch.Tensor]
    """Texts of which keys and values are sampled; none if nothing is to be learned."""
    cache: Cache
    """Which positions are exact. Queries are drawn from those that read quantized positions, keys
    and values past the sink, which no cache quantizes."""
    queries: int
    """The most queries to sample per text. A text too short to have any is skipped."""
    rows: int = LEARNING_TOKENS
    """The most tokens per text whose keys and values are sampled."""
    batch: int = 1
    """Texts of equal length per forward pass."""


@dataclass(frozen=True)
class Draw:
    """The positions that are sampled of one text, and where their rows begin among all rows; None
    if its queries are sampled."""

    ids: torch.Tensor
    number: int
    positions: torch.Tensor
    start: int | None


def draw_queries(settings: SamplingSettings) -> list[Draw]:
    """The queries that are sampled of each text that chooses."""
    first, draws = settings.cache.first_quantized, []
    for number, ids in enumerate(settings.choosing):
        positions = draw_positions(number, range(first, len(ids)), settings.queries)
        if len(positions):
            draws.append(Draw(ids, number, positions, start=None))
    return draws


def draw_rows(settings: SamplingSettings) -> list[Draw]:
    """The rows that are sampled of each fitted text."""
    start, draws = 0, []
    for number, ids in enumerate(settings.fitted):
        positions = draw_positions(number, range(settings.cache.sink, len(ids)), settings.rows)
        if len(positions):
            draws.append(Draw(ids, number, positions, start))
        start += len(positions)
    return draws


def batch_draws(settings: SamplingSettings, *kinds: Sequence[Draw]) -> list[list[Draw]]:
    """Batches of draws of one kind, whose texts have one length."""
    batches = []
    for draws in kinds:
        for length in dict.fromkeys(len(draw.ids) for draw in draws):
            alike = [draw for draw in draws if len(draw.ids) == length]
            size = settings.batch
            batches += [alike[at : at + size] for at in range(0, len(alike), size)]
    return batches


def draw_positions(text: int, positions: range, count: int) -> torch.Tensor:
    """Draw at most `count` of the positions, sorted; the draw is the same in every run."""
    # Python's generator draws the same positions on every device and with every version of torch.
    generator = random.Random(f"0 {text}")
    drawn = generator.sample(positions, min(count, len(positions)))
    return torch.tensor(sorted(drawn), dtype=torch.long)
