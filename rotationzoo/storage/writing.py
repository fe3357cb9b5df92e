"""Files that are written whole or not at all, and removed: no link is followed."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from rotationzoo.storage.files import disk_errors


def write_new(path: Path, data: bytes) -> None:
    """Write a file under a name that only this process uses. Whatever has the name is removed
    first, so that no link is followed and no file of another name changes. Raises `OSError`."""
    path.unlink(missing_ok=True)
    # O_EXCL refuses a file or a link that was put there in the meantime.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(data)


def replace(path: Path, data: bytes) -> None:
    """Replace `path` atomically: write a file next to it, then rename that. Raises
    `RotationZooError` where the disk refuses."""
    partial = path.with_name(path.name + ".partial")
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_new(partial, data)
            os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


def remove(path: Path) -> None:
    """Remove a file, a link (but not its target), or as much of a folder as can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
