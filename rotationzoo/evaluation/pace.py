"""The pace of an evaluation: how long a token takes through each cache, as it was measured last."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from rotationzoo.codec.layout import CacheLayout

Reader = tuple[CacheLayout, str] | None
"""A cache and the name of an arm; None for the exact model."""
Tell = Callable[[str], None]


def say_nothing(words: str) -> None:
    """Drop what there is to tell."""


@dataclass(frozen=True)
class Pace:
    """Seconds that a token takes, by its reader. `tell` is given sentences for the user."""

    tell: Tell = say_nothing
    seconds: dict[Reader, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, reader: Reader, tokens: int) -> Iterator[None]:
        """Measure how long this reader takes for so many tokens."""
        begun = perf_counter()
        yield
        self.seconds[reader] = (perf_counter() - begun) / tokens

    def estimate(self, tokens: int, arms: Collection[str] | None = None) -> float:
        """The seconds in which the exact model and all arms, or the named ones, take so many tokens
        each."""
        seconds = 0.0
        for reader, each in self.seconds.items():
            if reader is None or arms is None or reader[1] in arms:
                seconds += tokens * each
        return seconds
