"""The progress callback that jobs call, and what it counts; silent by default. `cli.progress_bar`
draws it."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path

LOOK = 0.5  # seconds between two looks at the files of a download

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


def in_tokens(progress: Progress, passes: Sequence[int]) -> Callable[[str, float, int], None]:
    """A `Progress` in tokens, for stages whose steps are forward passes. `passes`: the tokens that
    each of them reads, in order. A pass that is half done counts half of its tokens."""
    read = [0, *accumulate(passes)]

    def tell(stage: str, done: float, total: int) -> None:
        whole = int(done)
        part = sum(passes[whole : whole + 1]) * (done - whole)
        progress(stage, Tokens(read[whole] + part), Tokens(read[total]))

    return tell


@contextmanager
def showing(progress: Progress | None) -> Iterator[Progress]:
    """Yield the `progress` that a caller gave or, for None, one that shows a bar for each stage as
    the libraries of Hugging Face do. `HF_HUB_DISABLE_PROGRESS_BARS=1` turns theirs off, and these.
    """
    if progress is not None:
        yield progress
        return
    from huggingface_hub.utils import tqdm

    shown, bar = "", tqdm(disable=True)

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal shown, bar
        if stage != shown:
            bar.close()
            unit = {Tokens: " tokens", Bytes: "B"}.get(type(total), " steps")
            shown, bar = stage, tqdm(desc=stage, unit=unit, unit_scale=True)
        bar.total = total or None
        bar.update(done - bar.n)

    try:
        yield tell
    finally:
        bar.close()


@contextmanager
def repeating(call: Callable[[], None], seconds: float) -> Iterator[None]:
    """While the block runs, call again after each `seconds`, in a thread of its own."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def tell_growth(
    measure: Callable[[], int], stage: str, total: int, progress: Progress
) -> Iterator[None]:
    """While the block runs, tell `progress` how many of `total` bytes `measure` returns, because
    the hubs' clients do not tell. When it ends without an error, the last bytes are told, too."""

    def look() -> None:
        progress(stage, Bytes(min(measure(), total)), Bytes(total))

    look()
    with repeating(look, LOOK):
        yield
    look()


def size_of_all(paths: Iterable[Path]) -> int:
    """The bytes of files, of which some may be renamed or removed meanwhile."""
    size = 0
    with suppress(OSError):
        for path in paths:
            size += path.stat().st_size if path.is_file() else 0
    return size
