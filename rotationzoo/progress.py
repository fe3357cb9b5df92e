"""The progress callback that jobs call, and what it counts; silent by default. `cli.progress_bar`
draws it."""

from collections.abc import Callable, Sequence
from itertools import accumulate

Progress = Callable[[str, int, int], None]
"""Called as `(stage, done, total)`. It is called often, so it must be cheap. A total of 0 means
that the length of the stage is unknown. Counts are plain steps unless they are `Tokens` or
`Bytes`."""


class Tokens(int):
    """A number of tokens that a model reads or writes."""


class Bytes(int):
    """A number of bytes that are sent or received."""


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def in_tokens(progress: Progress, passes: Sequence[int]) -> Progress:
    """A `Progress` for stages whose steps are forward passes, which tells `progress` the tokens.

    `passes`: how many tokens each pass of the stage reads, in order.
    """
    read = [0, *accumulate(passes)]

    def tell(stage: str, done: int, total: int) -> None:
        progress(stage, Tokens(read[done]), Tokens(read[total]))

    return tell
