"""Files by name: where a name may lead, what may be opened, and how a file is written whole or not
at all.

Folders come from hubs, archives and other people's repositories. rotationzoo never puts a link, a
pipe or a name with `..` into one: such a thing is refused in one sentence, and never followed,
waited for or written to.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from rotationzoo.errors import RotationZooError

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
    """The name itself. Raises `ValueError` for one that is absolute, hidden, leaves its folder or
    is not made of letters, digits and `_.+-`."""
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no path inside a folder")
    return name


def child(folder: Path, name: str) -> Path:
    """The path of a name that was read from a file or a hub. This is the only place where such a
    name becomes a path.

    Raises `RotationZooError` for a name that is not plain, and for one that leads out of the folder
    by a symbolic link.
    """
    try:
        path = folder / plain(name)
    except ValueError as error:
        raise RotationZooError(str(error)) from error
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise RotationZooError(
            f"{path} leads out of its folder by a symbolic link", hint="remove the link"
        )
    return path


def size_of(path: Path) -> int | None:
    """Bytes of a regular file, or None where there is nothing. Raises `RotationZooError` for what
    is neither."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RotationZooError(
            f"{path} cannot be read: {error.strerror}", hint="check who may read it"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise RotationZooError(
            f"{path} is {kind} and not a file", hint="remove it, or put the file itself there"
        )
    return status.st_size


def regular_file(folder: Path, name: str) -> Path:
    """The path of a regular file of this folder: what may be verified, read and published.

    Raises `RotationZooError` for a name that is not plain, for what is missing, and for links and
    other special files.
    """
    path = child(folder, name)
    if size_of(path) is None:
        raise RotationZooError(f"{name} is missing", hint="fetch or make it again")
    return path


def read(path: Path, limit: int) -> bytes:
    """A regular file of at most `limit` bytes. Raises `RotationZooError` for anything else, before
    it is read."""
    size = size_of(path)
    if size is not None and size > limit:
        raise RotationZooError(
            f"{path} has {size:,} bytes, and no such file has more than {limit:,}"
        )
    try:
        # What was a file a moment ago may be a pipe now: without O_NONBLOCK that would be waited
        # for.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            return file.read(limit)
    except OSError as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else "check who may read it"
        raise RotationZooError(f"{path} cannot be read: {error.strerror}", hint=hint) from error


def write_new(path: Path, data: bytes) -> None:
    """Write a file under a name that this process alone uses. What is there is removed first, so
    that no link is followed and no file of another name is changed. Raises `OSError`."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(data)


def replace(path: Path, data: bytes) -> None:
    """Write a file that replaces `path` whole or not at all. Raises `RotationZooError` where the
    disk refuses."""
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
    """Remove a file, a link (not what it leads to), or as much of a folder as can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one sentence. safetensors reports such errors as an
    exception of its own."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RotationZooError(
            f"{path} cannot be written: {reason}",
            hint="make room, or choose another place with --output",
        ) from error


def digest(data: bytes) -> str:
    """sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
