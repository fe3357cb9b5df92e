"""The words that people read: numbers with their nouns, and names that were probably meant."""

import difflib
from collections.abc import Iterable, Sequence

_LEAST_ALIKE = 0.5  # of two names, as `difflib` measures it; lower, and anything is near
_LINE = 80  # characters of a text that others wrote


def counted(number: int, noun: str) -> str:
    """A number with its noun, given in the singular: `1 layer`, `2,048 layers`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def differing(names: Sequence[str]) -> str:
    """Names with their verb: `batch differs`, `batch, dtype differ`."""
    return f"{', '.join(names)} {'differs' if len(names) == 1 else 'differ'}"


def shortened(text: str, longest: int = _LINE) -> str:
    """The text, or its beginning where it is longer, by default than a line of a message."""
    return text if len(text) <= longest else text[:longest] + "..."


def nearest(word: str, known: Iterable[str], start: str = "") -> str:
    """The end of an error message: `start` and a known word, if one was probably meant."""
    match = difflib.get_close_matches(word[:_LINE], list(known), n=1, cutoff=_LEAST_ALIKE)
    return f" (did you mean {start + match[0]!r}?)" if match else ""


def sentence(words: str) -> str:
    """Words that follow a colon, as a sentence of their own."""
    return f"{words[:1].upper()}{words[1:]}."
