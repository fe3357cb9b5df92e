"""How a job reports what it is doing: a callback, silent by default."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""`(stage, done, total)`. It is called often, so it must be cheap. A total of 0 means that the
stage cannot be counted."""


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""
