"""Reading a folder while others replace it, as `storage.folders` does."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rotationzoo.errors import RotationZooError
from rotationzoo.storage.files import disk_errors

Result = TypeVar("Result")
_ATTEMPTS = 100  # at reading a folder that others replace all the time


def read_settled(folder: Path, read: Callable[[], Result]) -> Result:
    """The result of `read` for a folder. Where it fails because the folder was just being replaced,
    it is called again: between the two renames nothing has the folder's name.

    Raises what `read` raises, and as `recover`.
    """
    for _ in range(_ATTEMPTS - 1):
        recover(folder)
        before = _state(folder)
        try:
            return read()
        except (RotationZooError, FileNotFoundError):
            after = _state(folder)
            gone = after is None and not beside(folder, "old").is_dir()
            if before == after and (after is not None or (gone and _state(folder) is None)):
                raise
    return read()


def _state(folder: Path) -> tuple[int, int, int] | None:
    """How a folder differs from the one that replaces it; None where there is none. A new
    folder may get the number of one that was removed, but not its times."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def recover(folder: Path) -> None:
    """Put back the old folder if a killed process left it set aside. Raises `RotationZooError`
    where the disk refuses, or where another process holds the lock."""
    named = folder.name not in ("", "..")
    if named and not os.path.lexists(folder) and beside(folder, "old").is_dir():
        # A server reads folders, and hardly ever mends one.
        from rotationzoo.storage.locks import locked

        with disk_errors(folder), locked(beside(folder, "lock"), f"writing {folder}"):
            put_back(folder)


def put_back(folder: Path) -> None:
    """Rename the old folder back if a killed process left none under its name."""
    old = beside(folder, "old")
    if not os.path.lexists(folder) and old.is_dir() and not old.is_symlink():
        old.rename(folder)


def beside(folder: Path, what: str) -> Path:
    """The path next to a folder that is its `lock`, its `partial` successor or its `old` one."""
    return folder.with_name(f".{folder.name}.{what}")
