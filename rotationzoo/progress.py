"""The progress callback that jobs call, what it counts, and the bars for Python callers."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

LOOK = 0.5  # seconds between two checks of a download's files

Progress = Callable[[str, int, int], None]
"""Called as `(stage, done, total)`, often, so it must be cheap. A total of 0 is unknown. Counts are
plain steps unless they are `Tokens` or `Bytes`."""


class Tokens(int):
    """A number of tokens that a model reads or writes."""


class Bytes(int):
    """A number of bytes that are sent or received."""


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


class InTokens:
    """A `Progress` in tokens, for stages of forward passes; `passes`: the tokens of each."""

    def __init__(self, progress: Progress, passes: Sequence[int]):
        self._tell, self._passes = progress, passes
        self._read, self._last = [0, *accumulate(passes)], ("", 0, 0)

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._last = stage, done, total
        self._tell(stage, Tokens(self._read[done]), Tokens(self._read[total]))

    def tell_part(self, share: float) -> None:
        """Tell that this share of the next pass is done."""
        stage, done, total = self._last
        tokens = self._read[done] + share * self._passes[done]
        self._tell(stage, Tokens(tokens), Tokens(self._read[total]))


class Bars:
    """A `Progress` with a bar for each stage, which `HF_HUB_DISABLE_PROGRESS_BARS=1` turns off."""

    def __init__(self) -> None:
        self._stage, self._bar = "", cast(Any, None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        from huggingface_hub.utils import tqdm

        if stage != self._stage:
            if self._bar is not None:
                self._bar.close()
            unit, bar = {Tokens: " tokens", Bytes: "B"}.get(type(total), " steps"), cast(Any, tqdm)
            form = None if total else "{desc}: {elapsed}"
            self._bar = bar(desc=stage, unit=unit, unit_scale=True, bar_format=form)
            self._stage = stage
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)


@contextmanager
def repeating(call: Callable[[], None], seconds: float) -> Iterator[None]:
    """While the block runs, call it every few `seconds`, in a thread."""
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
    find: Callable[[], Iterable[Path]], stage: str, total: int, progress: Progress
) -> Iterator[None]:
    """Tell `progress` the bytes of the files that `find` returns while the block runs, because the
    hubs' clients do not."""

    def look() -> None:
        size = 0
        with suppress(OSError):  # a file may be gone by now
            for path in find():
                size += path.stat().st_size if path.is_file() else 0
        progress(stage, Bytes(min(size, total)), Bytes(total))

    look()
    with repeating(look, LOOK):
        yield
    look()
