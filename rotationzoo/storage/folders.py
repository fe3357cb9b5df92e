"""A folder that is replaced whole: made beside the old one under a lock, and exchanged by rename.

Whoever holds the lock `.NAME.lock` may replace NAME. The new folder is made as `.NAME.partial`, the
old one set aside as `.NAME.old`; a process that is killed between the two renames leaves the
latter, which the next one puts back.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.storage.files import disk_errors, remove
from rotationzoo.storage.locks import locked


@contextmanager
def temporary_sibling(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, on the same file system so that a rename is atomic. It is
    removed at the end if it is still there.

    The folder's lock is held meanwhile, and what killed processes left is put back or removed
    first. Raises `RotationZooError` where another process holds the lock, and for a `folder` that
    is a symbolic link.
    """
    check_name(folder)
    with locked(_beside(folder, "lock"), f"writing {folder}"):
        _put_back(folder)
        work = _beside(folder, "partial")
        for leftover in (work, _beside(folder, "old")):
            remove(leftover)
        work.mkdir()
        try:
            yield work
        finally:
            remove(work)


def install(work: Path, folder: Path) -> None:
    """Put `work` in the place of `folder`, by rename; the old folder is removed only afterwards.
    The caller holds its lock."""
    old = _beside(folder, "old")
    if os.path.lexists(folder):
        folder.rename(old)
    try:
        work.rename(folder)
    except BaseException:
        _put_back(folder)
        raise
    remove(old)


def carry_over(folder: Path, work: Path, without: set[str]) -> None:
    """Put everything in `folder` except the names in `without` into `work` too, as hard links, or
    as copies where the disk has none. Symbolic links stay symbolic links. Raises `OSError`."""
    shutil.copymode(folder, work)
    for path in folder.iterdir():
        if path.name in without:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, work / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, work / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a disk without hard links, or a file of somebody else's
        shutil.copy2(source, target, follow_symlinks=False)


def check_name(folder: Path) -> None:
    """Raise `UsageError` for a path that names no folder of its own, such as `.`, and for one that
    holds the current folder; and `RotationZooError` for a symbolic link, since nobody asked for the
    folder that it leads to to be replaced."""
    if folder.name in ("", ".."):
        raise UsageError(
            f"{folder} is no folder that can be replaced", hint="name a new folder with --output"
        )
    if folder.is_symlink():
        raise RotationZooError(
            f"{folder} is a symbolic link, which nothing is written through",
            hint=f"remove it, or name the folder that it leads to: {os.path.realpath(folder)}",
        )
    if folder.is_dir() and Path.cwd().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{folder} holds the current folder, and is replaced whole",
            hint="go to another folder first: cd ..",
        )


def recover(folder: Path) -> None:
    """Put back the old folder that a process had set aside when it was killed. Raises
    `RotationZooError` where the disk refuses, or another process holds the lock."""
    named = folder.name not in ("", "..")
    if named and not os.path.lexists(folder) and _beside(folder, "old").is_dir():
        with disk_errors(folder), locked(_beside(folder, "lock"), f"writing {folder}"):
            _put_back(folder)


def _put_back(folder: Path) -> None:
    """Rename the old folder back where a killed process left none of that name."""
    old = _beside(folder, "old")
    if not os.path.lexists(folder) and old.is_dir() and not old.is_symlink():
        old.rename(folder)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")
