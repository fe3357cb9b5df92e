"""The words of the command that is running, for hints that repeat it."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar

_words: ContextVar[tuple[str, ...]] = ContextVar("words", default=())


def remember_words(words: Sequence[str]) -> None:
    """Remember the words after `rotationzoo` on the command line."""
    _words.set(tuple(words))


def typed_words(*left_out: str) -> list[str]:
    """The words after `rotationzoo` on the command line, without some of its options, such as
    `--dry-run`."""
    return [word for word in _words.get() if word not in left_out]


def retyped(options: Mapping[str, str]) -> list[str]:
    """The words with these `options` in place of the ones of the same names."""
    kept: list[str] = []
    words = iter(_words.get())
    for word in words:
        if word in options:
            next(words, None)
        elif word.split("=")[0] not in options:
            kept.append(word)
    return [*kept, *(word for pair in options.items() for word in pair)]
