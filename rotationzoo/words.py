"""Words for people: numbers with nouns, sizes, shares and times, and names that are similar."""

import difflib
import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

_SIMILAR = 0.5  # least ratio of `difflib` for a name that was probably meant
_LINE = 80  # characters of a text that others wrote
UNKNOWN = "-"
"""A figure that was not measured."""


def counted(number: int, noun: str) -> str:
    """A number with its noun, given in the singular: `1 layer`, `2,048 layers`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def differing(names: Sequence[str]) -> str:
    """Names with their verb: `batch differs`, `batch, dtype differ`."""
    return f"{', '.join(names)} {'differs' if len(names) == 1 else 'differ'}"


def shortened(text: str, longest: int = _LINE) -> str:
    """The text, cut off after the `longest` number of characters."""
    return text if len(text) <= longest else text[:longest] + "..."


def nearest(word: str, known: Iterable[str], start: str = "") -> str:
    """The end of an error message: a known word after `start`, if one was probably meant."""
    match = difflib.get_close_matches(word[:_LINE], list(known), n=1, cutoff=_SIMILAR)
    return f" (did you mean {start + match[0]!r}?)" if match else ""


def sentence(words: str) -> str:
    """Words as a sentence."""
    return f"{words[:1].upper()}{words[1:]}."


def number(value: float | None, format: str = ".4g", error: float | None = None) -> str:
    """A number with its standard error, if known, or a dash."""
    if value is None:
        return UNKNOWN
    if error is None:
        return f"{value:{format}}"
    return f"{value:{format}} ±{error:{format.removeprefix('+')}}"


def percent(share: float | None, digits: int = 0, error: float | None = None) -> str:
    """A share, or a dash."""
    return number(share, f".{digits}%", error)


def change(share: float | None, digits: int = 2, error: float | None = None) -> str:
    """A relative change with its sign: `+1.20%`, or a dash."""
    return number(share, f"+.{digits}%", error)


def byte_count(size: float) -> str:
    """A number of bytes of memory, in the largest unit that fits."""
    for unit, count in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= count:
            return f"{size / count:.3g} {unit}"
    return f"{size:.0f} bytes"


def duration(seconds: float) -> str:
    """A length of time, rounded up to whole seconds, minutes, or tenths of an hour."""
    if seconds < 90:
        return counted(math.ceil(seconds), "second")
    if seconds < 90 * 60:
        return counted(math.ceil(seconds / 60), "minute")
    return f"{math.ceil(seconds / 360) / 10:.1f} hours"


def finish(seconds: float) -> str:
    """How long something takes, and when it ends: ` take about 12 minutes, until 14:32`."""
    ends = datetime.now() + timedelta(seconds=seconds)
    return f" take about {duration(seconds)}, until {ends:%H:%M}"


def size_words(count: int) -> str:
    """A number of bytes as hubs and data sheets count them, in GB (10^9) or MB."""
    if count < 1e9:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e9:.1f} GB" if count < 1e11 else f"{count / 1e9:,.0f} GB"


def numbers(values: Iterable[int]) -> str:
    """Numbers in a sentence: `2,048 and 8,192`."""
    return " and ".join(f"{value:,}" for value in values)
