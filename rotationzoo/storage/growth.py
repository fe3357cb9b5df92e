"""Telling how many bytes of a download have arrived, whoever writes the files."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rotationzoo.progress import Bytes, Progress

_LOOK = 0.5  # seconds between two looks at the folder


@contextmanager
def tell_growth(folder: Path, stage: str, total: int, progress: Progress) -> Iterator[None]:
    """While the block runs, tell `progress` how many of `total` bytes a folder holds.

    A thread of its own looks, because the hubs' clients tell nobody. It has told the last bytes
    when the block ends.
    """
    ended = threading.Event()

    def look() -> None:
        size = 0
        with suppress(OSError):  # a file was renamed or removed since it was listed
            for path in folder.rglob("*"):
                size += path.lstat().st_size if path.is_file() else 0
        progress(stage, Bytes(min(size, total)), Bytes(total))

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
