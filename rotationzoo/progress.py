"""The progress callback that jobs call; silent by default. `cli.progress_bar` draws it."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as `(stage, done, total)`. It is called often, so it must be cheap. A total of 0 means
that the length of the stage is unknown."""


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""
