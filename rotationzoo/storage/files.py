"""Safe access to files: which names may become paths, what may be opened, and how a folder is read
while others replace it.

Folders come from hubs, archives and other people's repositories. A link, a pipe or a name with `..`
in one is refused with a one-sentence error, and never followed, waited for or written to.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rotationzoo.errors import RotationZooError

# A part starts with a letter, a digit or `_`, which excludes `..` and hidden files.
_PART = r"\w[\w.+-]{0,127}"
_PLAIN = re.compile(rf"{_PART}(/{_PART}){{0,15}}")
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def plain(name: str) -> str:
    """The name itself. Raises `ValueError` for one that is absolute, is hidden, leaves its folder,
    or is not made of letters, digits and `_.+-`."""
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not a path inside a folder")
    return name


def child(folder: Path, name: str) -> Path:
    """The path inside `folder` of a name that was read from a file or a hub, which becomes a path
    nowhere else. Raises `RotationZooError` for a name that is not plain, and for one that leaves
    the folder through a symbolic link."""
    try:
        path = folder / plain(name)
    except ValueError as error:
        raise RotationZooError(str(error)) from error
    # Both are resolved, because the folder itself may lie behind a link.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        hint = "remove the link"
        raise RotationZooError(f"{path} leads out of its folder by a symbolic link", hint)
    return path


def size_of(path: Path) -> int | None:
    """Size of a regular file in bytes, or None where nothing exists. Raises `RotationZooError` for
    anything that is not a regular file."""
    try:
        status = path.lstat()  # a link counts as itself, not as what it leads to
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        hint = "check who may read it"
        raise RotationZooError(f"{path} cannot be read: {error.strerror}", hint) from error
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        hint = "remove it, or put the file itself there"
        raise RotationZooError(f"{path} is {kind} and not a file", hint)
    return status.st_size


def check_utf8(path: Path) -> None:
    """Raise `RotationZooError` for a path that neither safetensors nor JSON can name."""
    if re.search("[\ud800-\udfff]", str(path)):
        raise RotationZooError(f"the name of {path} is not UTF-8", hint="rename it in UTF-8")


def regular_file(folder: Path, name: str) -> Path:
    """The path of a regular file in this folder. Raises `RotationZooError` for a name that is not
    plain, for a missing file, and for links and other special files."""
    path = child(folder, name)
    if size_of(path) is None:
        raise RotationZooError(f"{name} is missing", hint="fetch or make it again")
    return path


def read(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises `RotationZooError` for anything else,
    before reading it."""
    size = size_of(path)
    if size is not None and size > limit:
        raise RotationZooError(
            f"{path} has {size:,} bytes, and no such file has more than {limit:,}"
        )
    try:
        # The file may have become a pipe since `size_of` looked. O_NONBLOCK keeps the call from
        # waiting for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            return file.read(limit)  # the file may have grown since `size_of` looked
    except OSError as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else "check who may read it"
        raise RotationZooError(f"{path} cannot be read: {error.strerror}", hint=hint) from error


def digest(data: bytes) -> str:
    """sha256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_TABLE_LIMIT = 256 << 20  # bytes; the index of a mixture of experts has a line for each tensor


def read_json(path: Path) -> dict[str, Any]:
    """Read a table from a JSON file of a model; empty where there is no readable table. The
    file may be a link, as in the hub's cache."""
    try:
        content = json.loads(read(Path(os.path.realpath(path)), _TABLE_LIMIT))
    except (RotationZooError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


Result = TypeVar("Result")
_ATTEMPTS = 100  # at reading a folder that others replace all the time


def read_settled(folder: Path, read: Callable[[], Result]) -> Result:
    """The result of `read` for a folder. Where it fails because the folder was just being replaced,
    it is called again: between the two renames nothing has the folder's name. Raises what `read`
    raises, and as `recover`."""
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
        from rotationzoo.storage.disks import disk_errors
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
