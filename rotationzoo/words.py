"""The words of messages: numbers with their nouns, and names that were probably meant."""

import difflib
from collections.abc import Iterable, Sequence

_LEAST_ALIKE = 0.5  # of two names, as `difflib` measures it; lower, and anything is near
_LINE = 80  # characters of a message from another library


def counted(number: int, noun: str) -> str:
    """A number with its noun, given in the singular: `1 layer`, `2,048 layers`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def differing(names: Sequence[str]) -> str:
    """Names with their verb: `batch differs`, `batch, dtype differ`."""
    return f"{', '.join(names)} {'differs' if len(names) == 1 else 'differ'}"


def shortened(text: str) -> str:
    """The text, or its beginning where it is longer than a line of a message."""
    return text if len(text) <= _LINE else text[:_LINE] + "..."


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: a known word that was probably meant, or nothing if none is
    close."""
    match = difflib.get_close_matches(word[:_LINE], list(known), n=1, cutoff=_LEAST_ALIKE)
    return f" (did you mean {match[0]!r}?)" if match else ""
