"""Atomic replacement of a folder: the new one is built next to the old one, under a lock, and
renamed into its place.

A process must hold the lock `.NAME.lock` to replace NAME. It builds the new folder as
`.NAME.partial` and renames the old one to `.NAME.old`. If it is killed between the two renames,
`.NAME.old` remains, and the next process renames it back (`storage.settled`).
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.storage.files import disk_errors
from rotationzoo.storage.locks import locked
from rotationzoo.storage.settled import beside, put_back
from rotationzoo.storage.writing import remove


@contextmanager
def temporary_sibling(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to `folder`. Both are on one file system, so that a rename is atomic.
    The new folder is removed at the end if it is still there.

    The folder's lock is held throughout. What killed processes left is first put back or removed.
    Raises `RotationZooError` where another process holds the lock, and for a `folder` that is a
    symbolic link.
    """
    check_name(folder)
    with locked(beside(folder, "lock"), f"writing {folder}"):
        put_back(folder)
        work = beside(folder, "partial")
        for leftover in (work, beside(folder, "old")):
            remove(leftover)
        work.mkdir()
        try:
            yield work
        finally:
            remove(work)


def install(work: Path, folder: Path) -> None:
    """Rename `work` into the place of `folder`. The old folder is removed only after that. The
    caller holds its lock."""
    old = beside(folder, "old")
    if os.path.lexists(folder):  # unlike `exists`, it also sees a broken link
        folder.rename(old)
    try:
        work.rename(folder)
    except BaseException:  # also when the user stops the program
        put_back(folder)
        raise
    remove(old)


def carry_over(folder: Path, work: Path, without: set[str]) -> None:
    """Put everything in `folder` except the names in `without` into `work` too. Files are
    hard-linked, or copied where the disk has no hard links. Symbolic links stay symbolic links.
    Raises `OSError`."""
    shutil.copymode(folder, work)
    for path in folder.iterdir():
        if path.name in without:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, work / path.name, symlinks=True, copy_function=link)
        else:
            link(path, work / path.name)


def link(source: str | Path, target: str | Path) -> None:
    """Hard-link a file, or copy it where the disk has no hard links. Raises `OSError`."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a disk without hard links, or another user's file
        shutil.copy2(source, target, follow_symlinks=False)


def check_name(folder: Path) -> None:
    """Check that `folder` may be replaced whole. Raises `UsageError` for a path without a name of
    its own, such as `.`, and for a folder that contains the current one. Raises `RotationZooError`
    for a symbolic link, because the folder that it leads to was not to be replaced."""
    if folder.name in ("", ".."):
        raise UsageError(
            f"{folder} is no folder that can be replaced", hint="name a new folder with --output"
        )
    if folder.is_symlink():
        raise RotationZooError(
            f"{folder} is a symbolic link, which nothing is written through",
            hint=f"remove it, or name the folder that it leads to: {os.path.realpath(folder)}",
        )
    # Replacing it would leave the user's shell in a removed folder.
    if folder.is_dir() and Path.cwd().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{folder} holds the current folder, and is replaced whole",
            hint="go to another folder first: cd ..",
        )


def check_writable(folder: Path) -> None:
    """Check that a folder can be made here, and leave nothing behind. Raises `RotationZooError`
    where the disk refuses, or where another process holds the folder's lock."""
    with disk_errors(folder):
        if folder.parent.exists():
            with temporary_sibling(folder):
                pass
        else:
            # The name is random here. One made from the folder's name could clash with that of
            # another job, whose folder does not exist yet and has the same existing parent.
            tempfile.TemporaryDirectory(dir=existing_parent(folder)).cleanup()


def state_folder() -> Path:
    """Where rotationzoo remembers from one command to the next: below `XDG_STATE_HOME`, or
    `~/.local/state`. It may not exist. Raises `RuntimeError` for a user without a home."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "rotationzoo"


def existing_parent(path: Path) -> Path:
    """The nearest parent folder that exists."""
    return next(folder for folder in path.absolute().parents if folder.exists())


def default_output(model: str, suffix: str) -> Path:
    """The folder `rotations/MODEL-SUFFIX`.

    For a local model, MODEL is the folder's name, even if its path is `.`.
    """
    path = Path(model)
    name = path.resolve().name if path.is_dir() else path.name
    return Path("rotations") / f"{name}-{suffix}"
