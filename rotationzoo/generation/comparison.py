"""Where two continuations of the same prompt part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rotationzoo.generation.decoding import INTERRUPTED, Continuation


@dataclass(frozen=True)
class Parting:
    """The first place at which two texts differ."""

    character: int
    """How many characters are the same before it."""
    token: int
    """How many tokens are the same before it."""


def find_parting(one: Continuation, other: Continuation) -> Parting | None:
    """Where two continuations part, or None if they are the same as far as both go: one that was
    interrupted is only compared up to there."""
    token = _common(one.ids, other.ids)
    cut_short = [len(each.ids) for each in (one, other) if each.stop == INTERRUPTED]
    if token in (*cut_short, max(len(one.ids), len(other.ids))):
        return None
    return Parting(_common(one.text, other.text), token)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements are the same at the start of both."""
    pairs = zip(one, other, strict=False)
    differing = (at for at, (first, second) in enumerate(pairs) if first != second)
    return next(differing, min(len(one), len(other)))
