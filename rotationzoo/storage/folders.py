"""Files and folders that are written completely or not at all: the new one is made next to the old
one and renamed into place. No link is followed.

A process that replaces NAME holds the lock `.NAME.lock`. It builds the new folder as
`.NAME.partial`, and renames the old one to `.NAME.old`. If it is killed between the two renames,
the next process renames `.NAME.old` back (`recover`).
"""

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.storage.files import ROOM, WAY_OUT, check_utf8, disk_errors

WAIT = 60.0  # seconds to wait for another process; putting files in place takes less
_PAUSE = 0.05
_OPENINGS = 5  # attempts to make the folder of a lock, which another process may remove again
_SILENCE = 1.0  # seconds of waiting before the log mentions it
_ATTEMPTS = 100  # to read a folder that others replace all the time
Result = TypeVar("Result")


def write_new(path: Path, data: bytes) -> None:
    """Write a new file. A file or a link of that name is removed first. Raises `OSError`."""
    path.unlink(missing_ok=True)
    # O_EXCL refuses a file or a link that was put there meanwhile.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(data)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, by a rename. Raises `RotationZooError` for a disk error."""
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
    """Remove a file, a link but not its target, or as much of a folder as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def temporary_sibling(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to `folder`, and remove it at the end unless it was renamed. First,
    leftovers of killed processes are put back or removed. Raises as `locked` and `check_name`."""
    check_name(folder)
    with locked(sibling(folder, "lock"), f"writing {folder}"):
        put_back(folder)
        work = sibling(folder, "partial")
        for leftover in (work, sibling(folder, "old")):
            remove(leftover)
        work.mkdir()
        try:
            yield work
        finally:
            remove(work)


def install(work: Path, folder: Path) -> None:
    """Replace `folder` with `work`, then remove the old one. The caller holds the lock."""
    old = sibling(folder, "old")
    if os.path.lexists(folder):  # which may be a broken link
        folder.rename(old)
    try:
        work.rename(folder)
    except BaseException:  # such as `KeyboardInterrupt`
        put_back(folder)
        raise
    remove(old)


def carry_over(folder: Path, work: Path, without: set[str]) -> None:
    """Hard-link or copy the content of `folder`, with links as links. Raises `OSError`."""
    shutil.copymode(folder, work)
    for path in folder.iterdir():
        if path.name in without:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, work / path.name, symlinks=True, copy_function=link)
        else:
            link(path, work / path.name)


def link(source: str | Path, target: str | Path) -> None:
    """Hard-link a file, or else copy it. Raises `OSError`."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a disk without hard links, or another user's file
        shutil.copy2(source, target, follow_symlinks=False)


def check_name(folder: Path) -> None:
    """Check that `folder` may be replaced. Raises `UsageError` for a path without a name, such as
    `.`, and for a folder that contains the current one, and `RotationZooError` for a link."""
    check_utf8(folder)
    if folder.name in ("", ".."):
        problem = f"{folder} is not a folder that can be replaced"
        raise UsageError(problem, "name a new folder with --output")
    if folder.is_symlink():
        problem = f"{folder} is a symbolic link, and nothing is written through links"
        hint = f"remove it, or name the folder that it leads to: {os.path.realpath(folder)}"
        raise RotationZooError(problem, hint)
    # Replacing it would leave the user's shell in a removed folder.
    if folder.is_dir() and Path.cwd().is_relative_to(folder.resolve()):
        problem = f"{folder} contains the current folder, and would be replaced as a whole"
        raise UsageError(problem, "go to another folder first: cd ..")


def follow_link(folder: str | Path | None) -> Path | None:
    """The folder that the user named, with a symbolic link resolved. Only a named link is followed:
    anyone may have planted one in a default place."""
    if folder is None:
        return None
    folder = Path(folder).expanduser()
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


def check_writable(folder: Path) -> None:
    """Raise `RotationZooError` unless a folder can be made here, and leave nothing behind."""
    with disk_errors(folder), temporary_sibling(folder):
        pass


def check_room(folder: Path, needed: int, way_out: str = WAY_OUT) -> None:
    """Raise `RotationZooError` if the disk of a folder has less than `needed` bytes free."""
    place = folder.absolute()
    existing = next(each for each in (place, *place.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        has = f"the disk of {folder} has {free / 1e6:,.0f} MB free"
        problem = f"{has} and {needed / 1e6:,.0f} MB are needed"
        raise RotationZooError(problem, f"{ROOM}, or {way_out}")


def state_folder() -> Path:
    """The folder for state between commands, which may not exist: in `XDG_STATE_HOME`, or else
    `~/.local/state`. Raises `RuntimeError` for a user without a home."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "rotationzoo"


def default_output(model: str, suffix: str) -> Path:
    """The folder `rotations/MODEL-SUFFIX`."""
    path = Path(model)
    name = path.resolve().name if path.is_dir() else path.name
    return Path("rotations") / f"{name}-{suffix}"


def read_settled(folder: Path, read: Callable[[], Result]) -> Result:
    """The result of `read`. It is called again if it fails while the folder is being replaced:
    between the two renames there is no such folder. Raises what `read` raises, and as `recover`."""
    for _ in range(_ATTEMPTS - 1):
        recover(folder)
        before = _state(folder)
        try:
            return read()
        except (RotationZooError, FileNotFoundError):
            after = _state(folder)
            gone = after is None and not sibling(folder, "old").is_dir()
            if before == after and (after is not None or (gone and _state(folder) is None)):
                raise
    return read()


def _state(folder: Path) -> tuple[int, int, int] | None:
    """Tells a folder from its replacement; None if it is missing. A new folder may reuse the inode
    number of a removed one, but not its times."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def recover(folder: Path) -> None:
    """`put_back` under the lock. Raises `RotationZooError` for a disk error, and as `locked`."""
    named = folder.name not in ("", "..")
    if named and not os.path.lexists(folder) and sibling(folder, "old").is_dir():
        with disk_errors(folder), locked(sibling(folder, "lock"), f"writing {folder}"):
            put_back(folder)


def put_back(folder: Path) -> None:
    """Rename the old folder back if there is none under its name. The caller holds the lock."""
    old = sibling(folder, "old")
    if not os.path.lexists(folder) and old.is_dir() and not old.is_symlink():
        old.rename(folder)


def sibling(folder: Path, what: str) -> Path:
    """The path next to a folder of its `lock`, its `partial` successor, or the `old` one."""
    return folder.with_name(f".{folder.name}.{what}")


# `filelock` (4.0) is no substitute: it truncates whatever file has the lock's name, which may be a
# hard link, waits for a minute where no file can be made, and on file systems without `flock` uses
# a lock that outlives its process.
@contextmanager
def locked(lock: Path, doing: str) -> Iterator[None]:
    """Hold the lock file while the block runs. `doing`: what another process with the lock does.
    Folders that were made for the lock are removed if they are empty. Raises `RotationZooError`
    after `WAIT` seconds and for a symbolic link, and `OSError` if the file cannot be made."""
    missing = [folder for folder in lock.absolute().parents if not folder.exists()]
    started, mentioned = time.monotonic(), False
    while (handle := _try(lock)) is None:
        waited = time.monotonic() - started
        if waited > WAIT:
            problem = f"another process is {doing}; gave up after {WAIT:g} s"
            raise RotationZooError(problem, "run the command again when it is done")
        if waited > min(_SILENCE, WAIT / 2) and not mentioned:
            words = "Waiting up to %g s for another process that is %s"
            logging.getLogger(__name__).warning(words, WAIT, doing)
            mentioned = True
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        # Before the release, so that a waiting process sees that it is gone and makes a new one.
        lock.unlink(missing_ok=True)
        os.close(handle)
        with suppress(OSError):
            for folder in missing:
                folder.rmdir()


def _try(lock: Path) -> int | None:
    """The open lock file, or None if another process holds it, or has just removed it."""
    try:
        handle = _open(lock)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RotationZooError(f"{lock} is a symbolic link, not a lock", "remove it") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), lock.lstat()):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


def _open(lock: Path) -> int:
    """Open the lock file, or make it. Its folder is made up to `_OPENINGS` times, because another
    process may just have removed it. Raises `OSError`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(_OPENINGS - 1):
        with suppress(FileNotFoundError):  # in a place such as /proc, every time
            lock.parent.mkdir(parents=True, exist_ok=True)
            return os.open(lock, flags, 0o666)
        time.sleep(_PAUSE)
    lock.parent.mkdir(parents=True, exist_ok=True)
    return os.open(lock, flags, 0o666)
