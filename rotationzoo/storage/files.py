"""Safe access to files: which names may become paths, what may be opened, and what to do about disk
errors.

Folders come from hubs, archives and other people's repositories. A link, a pipe or a name with `..`
is refused with a one-sentence error, and never followed, waited for or written to.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rotationzoo.errors import RotationZooError

# A part starts with a letter, a digit or `_`, which excludes `..` and hidden files.
_PART = r"\w[\w.+-]{0,127}"
_PLAIN = re.compile(rf"{_PART}(/{_PART}){{0,15}}")
ROOM, WAY_OUT = "make room", "choose another place with --output"
_REMEDIES = {errno.EROFS: "mount it for writing"}
_REMEDIES |= dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), ROOM)
_REMEDIES |= dict.fromkeys((errno.EACCES, errno.EPERM), "check who may read and write there")


def plain(name: str) -> str:
    """The name itself. Raises `ValueError` for one that is absolute, is hidden, leaves its folder,
    or is not made of letters, digits and `_.+-`."""
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not a path inside a folder")
    return name


def child(folder: Path, name: str) -> Path:
    """The path inside `folder` of a name read from a file or a hub; the only place where such a
    name becomes a path. Raises `RotationZooError` unless it is plain and stays in the folder."""
    try:
        path = folder / plain(name)
    except ValueError as error:
        raise RotationZooError(str(error)) from error
    # Both are resolved, because the folder itself may lie behind a link.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        problem = f"{path} leads out of its folder by a symbolic link"
        raise RotationZooError(problem, "remove the link")
    return path


def size_of(path: Path) -> int | None:
    """Size of a regular file in bytes, or None if nothing exists. Raises `RotationZooError` for
    anything else, links included."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        hint = "check who may read it"
        raise RotationZooError(f"{path} cannot be read: {error.strerror}", hint) from error
    if not stat.S_ISREG(status.st_mode):
        hint = "remove it, or put the file itself there"
        other = "a symbolic link, a folder, a pipe or a device, and not a file"
        raise RotationZooError(f"{path} is {other}", hint)
    return status.st_size


def check_utf8(path: Path) -> None:
    """Raise `RotationZooError` for a path that safetensors and JSON cannot represent."""
    if re.search("[\ud800-\udfff]", str(path)):
        raise RotationZooError(f"the name of {path} is not UTF-8", hint="rename it in UTF-8")


def regular_file(folder: Path, name: str) -> Path:
    """The path of a regular file in this folder. Raises as `child` and `size_of`, and
    `RotationZooError` if it is missing."""
    path = child(folder, name)
    if size_of(path) is None:
        raise RotationZooError(f"{name} is missing", hint="fetch or make it again")
    return path


def read(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises `RotationZooError` for anything else,
    before reading it."""
    if (size := size_of(path) or 0) > limit:
        problem = f"{path} has {size:,} bytes, and no such file has more than {limit:,}"
        raise RotationZooError(problem)
    try:
        # The file may have become a pipe or grown since `size_of` looked. O_NONBLOCK keeps the
        # call from waiting for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            return file.read(limit)
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
    """Read a JSON object from a file of a model, or {} if there is none. The file may be a link, as
    in the hub's cache."""
    try:
        content = json.loads(read(Path(os.path.realpath(path)), _TABLE_LIMIT))
    except (RotationZooError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def remedy(error: BaseException | None) -> str | None:
    """What helps against a disk error, whose number safetensors puts in its message only; None for
    other errors."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return _REMEDIES.get(int(found[1]) if found else getattr(error, "errno", None) or 0)


@contextmanager
def disk_errors(path: Path, way_out: str = WAY_OUT) -> Iterator[None]:
    """Turn a disk error into one sentence, with its remedy or `way_out` (how to choose another
    place) as the hint."""
    from safetensors import SafetensorError  # `--help` does not wait for it

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        ways = ", or ".join(filter(None, (remedy(error), way_out)))
        raise RotationZooError(f"{path} cannot be written: {reason}", ways) from error


def check_regular(path: Path) -> None:
    """Raise `RotationZooError` unless `path` is a regular file that this user may read: a pipe or a
    device could block forever."""
    if not path.exists():
        raise RotationZooError(f"there is no file {path}", hint="check the path")
    if not path.is_file():
        raise RotationZooError(f"{path} is not a regular file", hint="give a file")
    if not os.access(path, os.R_OK):
        raise RotationZooError(f"{path} cannot be read: permission denied", hint="check the path")
