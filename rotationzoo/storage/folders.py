"""Files and folders that are written whole or not at all: the new one is made next to the old one,
and renamed into its place. No link is followed.

A process must hold the lock `.NAME.lock` to replace NAME. It builds the new folder as
`.NAME.partial` and renames the old one to `.NAME.old`. If it is killed between the two renames,
`.NAME.old` remains, and the next process renames it back (`files.recover`).
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.storage.disks import ROOM, WAY_OUT, disk_errors
from rotationzoo.storage.files import beside, check_utf8, put_back
from rotationzoo.storage.locks import locked


def write_new(path: Path, data: bytes) -> None:
    """Write a file under a name that only this process uses. What has the name is removed
    first, so that no link is followed and no file of another name changes. Raises `OSError`."""
    path.unlink(missing_ok=True)
    # O_EXCL refuses a file or a link that was put there in the meantime.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(data)


def replace_file(path: Path, data: bytes) -> None:
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


@contextmanager
def temporary_sibling(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to `folder`, on one file system, so that a rename is atomic. It is
    removed at the end if it is still there. What killed processes left is put back or removed.
    Raises `RotationZooError` where another process holds the lock, which is held throughout, and
    for a `folder` that is a symbolic link."""
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
    its own, such as `.`, and for a folder that contains the current one, and `RotationZooError` for
    a symbolic link."""
    check_utf8(folder)
    if folder.name in ("", ".."):
        hint = "name a new folder with --output"
        raise UsageError(f"{folder} is not a folder that can be replaced", hint)
    if folder.is_symlink():
        problem = f"{folder} is a symbolic link, which nothing is written through"
        hint = f"remove it, or name the folder that it leads to: {os.path.realpath(folder)}"
        raise RotationZooError(problem, hint)
    # Replacing it would leave the user's shell in a removed folder.
    if folder.is_dir() and Path.cwd().is_relative_to(folder.resolve()):
        hint = "go to another folder first: cd .."
        raise UsageError(f"{folder} holds the current folder, and is replaced whole", hint)


def check_writable(folder: Path) -> None:
    """Check that a folder can be made here, and leave nothing behind. Raises `RotationZooError`
    where the disk refuses, or where another process holds the folder's lock."""
    with disk_errors(folder):
        if folder.parent.exists():
            with temporary_sibling(folder):
                pass
        else:
            # With a random name, which clashes with that of no other job.
            tempfile.TemporaryDirectory(dir=existing_parent(folder)).cleanup()


def check_room(folder: Path, needed: int, way_out: str = WAY_OUT) -> None:
    """Raise `RotationZooError` if the disk of a folder has less than `needed` bytes free."""
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < needed:
        has = f"the disk of {folder} has {free / 1e6:,.0f} MB free"
        hint = f"{ROOM}, or {way_out}"
        raise RotationZooError(f"{has} and {needed / 1e6:,.0f} MB are needed", hint)


def state_folder() -> Path:
    """Where rotationzoo remembers from one command to the next: below `XDG_STATE_HOME`, or
    `~/.local/state`. It may not exist. Raises `RuntimeError` for a user without a home."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "rotationzoo"


def existing_parent(path: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def default_output(model: str, suffix: str) -> Path:
    """The folder `rotations/MODEL-SUFFIX`, with the name of a local model's folder."""
    path = Path(model)
    name = path.resolve().name if path.is_dir() else path.name
    return Path("rotations") / f"{name}-{suffix}"
