"""A folder that is replaced whole: made beside the old one under a lock, and exchanged by rename.

Whoever holds the lock `.NAME.lock` may replace NAME. The new folder is made as `.NAME.partial`, the
old one set aside as `.NAME.old`; a process that is killed between the two renames leaves the
latter, which the next one puts back.
"""

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.storage.files import disk_errors, remove

WAIT = 60.0  # seconds that another process is waited for: putting files in place takes less
_PAUSE = 0.05
log = logging.getLogger(__name__)


@contextmanager
def held(lock: Path, doing: str, kept: bool = False) -> Iterator[None]:
    """Hold a lock file alone; it is removed at the end unless it is `kept` for others that know it.

    Says what it waits for if that takes a second. Raises `RotationZooError` after `WAIT` seconds,
    and for a link in its place.
    """
    started, told = time.monotonic(), False
    while (handle := _try(lock)) is None:
        waited = time.monotonic() - started
        if waited > WAIT:
            raise RotationZooError(
                f"another process is {doing}; gave up after {WAIT:g} s",
                hint="run the command again when it is done",
            )
        if waited > min(1.0, WAIT / 2) and not told:
            log.warning("Waiting up to %g s for another process that is %s", WAIT, doing)
            told = True
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        if not kept:
            lock.unlink(
                missing_ok=True
            )  # before it is let go: who waits sees that the file is gone and makes its own
        os.close(handle)


def _try(lock: Path) -> int | None:
    """The open lock file, or None while another process holds it. It counts only while it is the
    file of that name."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(
            lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
    except FileNotFoundError:  # the folder above was removed by another process a moment ago
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RotationZooError(
            f"{lock} is a symbolic link, and no lock is one", hint="remove it"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), lock.lstat()):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


@contextmanager
def temporary_sibling(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, on the same file system so that a rename is atomic; gone at the
    end if still there.

    Held under the folder's lock, with what killed processes left put back or cleared away. Raises
    `RotationZooError` where another process holds the lock, and for a `folder` that is a symbolic
    link.
    """
    check_name(folder)
    with held(_beside(folder, "lock"), f"writing {folder}"):
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
    """Put `work` in the place of `folder`, by rename; what was there is given up only afterwards.
    Under its lock."""
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
    """Put everything of `folder` but the names in `without` into `work` too: as hard links, or
    copies where there are none. Symbolic links stay what they are. Raises `OSError`."""
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
    """Raise `UsageError` for a path that names no folder of its own, such as `.`, or the folder
    that this process is in, and `RotationZooError` for a symbolic link: where it leads, nobody has
    said."""
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
    """Put back what a process that was killed while replacing it had set aside. Raises
    `RotationZooError` where the disk refuses, or another process holds the lock."""
    if (
        folder.name not in ("", "..")
        and not os.path.lexists(folder)
        and _beside(folder, "old").is_dir()
    ):
        with disk_errors(folder), held(_beside(folder, "lock"), f"writing {folder}"):
            _put_back(folder)


def _put_back(folder: Path) -> None:
    old = _beside(folder, "old")
    if not os.path.lexists(folder) and old.is_dir() and not old.is_symlink():
        old.rename(folder)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")
