"""Safe access to files: names that may become paths, files that may be opened, and disk errors.

Folders come from hubs, archives and other people's repositories. A link, a pipe or a name with `..`
is refused with a one-sentence error. It is never followed, read or written to.
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
    """The name itself. Raises `ValueError` for one that is absolute or hidden, leaves its folder,
    or has characters other than letters, digits and `_.+-`."""
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not a path inside a folder")
    return name


def child(folder: Path, name: str) -> Path:
    """The path in `folder` of a name from a file or a hub. Only here does such a name become a
    path. Raises `RotationZooError` unless it is plain and stays in the folder."""
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
    """The size of a regular file in bytes, or None. Raises `RotationZooError` for a link, say."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        hint = "check who may read it"
        raise RotationZooError(f"{path} cannot be read: {error.strerror}", hint) from error
    if not stat.S_ISREG(status.st_mode):
        other = "a symbolic link, a folder, a pipe or a device, and not a file"
        raise RotationZooError(f"{path} is {other}", "remove it, or put the file itself there")
    return status.st_size


def check_utf8(path: Path) -> None:
    """Raise `RotationZooError` for a path that safetensors and JSON cannot encode."""
    if re.search("[\ud800-\udfff]", str(path)):
        raise RotationZooError(f"the name of {path} is not UTF-8", hint="rename it in UTF-8")


def regular_file(folder: Path, name: str) -> Path:
    """The path of a regular file in this folder. Raises `RotationZooError` for anything else."""
    path = child(folder, name)
    if size_of(path) is None:
        raise RotationZooError(f"{name} is missing", hint="fetch or make it again")
    return path


def read(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises `RotationZooError` for others."""
    if (size := size_of(path) or 0) > limit:
        most = f"no such file has more than {limit:,}"
        raise RotationZooError(f"{path} has {size:,} bytes, and {most}")
    try:
        # If it has become a pipe since, O_NONBLOCK keeps the call from waiting for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            return file.read(limit)
    except OSError as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else "check who may read it"
        raise RotationZooError(f"{path} cannot be read: {error.strerror}", hint=hint) from error


def digest(data: bytes) -> str:
    """The sha256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a model's file or behind a link, as in the hub's cache; {} for none."""
    limit = 256 << 20  # bytes; the index of a mixture of experts has a line for each tensor
    try:
        content = json.loads(read(Path(os.path.realpath(path)), limit))
    except (RotationZooError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def remedy(error: BaseException | None) -> str | None:
    """How to fix a disk error; None for other errors. safetensors has its number in the message."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return _REMEDIES.get(int(found[1]) if found else getattr(error, "errno", None) or 0)


@contextmanager
def disk_errors(path: Path, way_out: str = WAY_OUT) -> Iterator[None]:
    """Turn a disk error into one sentence. `way_out`: how to choose another place."""
    from safetensors import SafetensorError  # not at the top, so that `--help` is quick

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        ways = ", or ".join(filter(None, (remedy(error), way_out)))
        raise RotationZooError(f"{path} cannot be written: {reason}", ways) from error


def check_regular(path: Path) -> None:
    """Raise `RotationZooError` unless `path` is a regular file, which cannot block forever."""
    if not path.exists():
        raise RotationZooError(f"there is no file {path}", hint="check the path")
    if not path.is_file():
        raise RotationZooError(f"{path} is not a regular file", hint="give a file")
    if not os.access(path, os.R_OK):
        raise RotationZooError(f"{path} cannot be read: permission denied", hint="check the path")
