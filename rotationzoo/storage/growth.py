"""Telling how many bytes of a download have arrived, no matter which client writes the files."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rotationzoo.progress import Bytes, Progress

_LOOK = 0.5  # seconds between two looks at the files


@contextmanager
def tell_growth(
    measure: Callable[[], int], stage: str, total: int, progress: Progress
) -> Iterator[None]:
    """While the block runs, tell `progress` how many of `total` bytes `measure` returns.

    A thread of its own looks, because the hubs' clients do not tell. When the block ends without an
    error, it has told the last bytes.
    """
    ended = threading.Event()

    def look() -> None:
        progress(stage, Bytes(min(measure(), total)), Bytes(total))

    def watch() -> None:
        while not ended.wait(_LOOK):
            look()

    look()
    thread = threading.Thread(target=watch, name="growth", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    look()


def size_of_all(paths: Iterable[Path]) -> int:
    """The bytes of files, of which some may be renamed or removed meanwhile."""
    size = 0
    with suppress(OSError):
        for path in paths:
            size += path.stat().st_size if path.is_file() else 0
    return size
