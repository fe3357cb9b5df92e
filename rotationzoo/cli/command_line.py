"""The words of the command that is running, for hints that repeat it."""

from collections.abc import Sequence
from contextvars import ContextVar

_words: ContextVar[tuple[str, ...]] = ContextVar("words", default=())


def remember_words(words: Sequence[str]) -> None:
    """Remember the words after `rotationzoo` on the command line."""
    _words.set(tuple(words))


def typed_words(*left_out: str) -> list[str]:
    """The words after `rotationzoo` on the command line, without some of its options, such as
    `--dry-run`."""
    return [word for word in _words.get() if word not in left_out]
