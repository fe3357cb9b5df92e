"""Errors of a disk in one sentence, with what helps: space, a permission, or another place."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rotationzoo.errors import RotationZooError

ROOM, WAY_OUT = "make room", "choose another place with --output"
_REMEDIES = {errno.EROFS: "mount it for writing"}
_REMEDIES |= dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), ROOM)
_REMEDIES |= dict.fromkeys((errno.EACCES, errno.EPERM), "check who may read and write there")


def remedy(error: BaseException | None) -> str | None:
    """What helps against the error of a disk, whose number safetensors has in its text alone; None
    for all other errors."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return _REMEDIES.get(int(found[1]) if found else getattr(error, "errno", None) or 0)


@contextmanager
def disk_errors(path: Path, way_out: str = WAY_OUT) -> Iterator[None]:
    """Turn the error of a disk into one sentence, whose hint is its remedy or `way_out`, which says
    how to name another place."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        ways = ", or ".join(filter(None, (remedy(error), way_out)))
        raise RotationZooError(f"{path} cannot be written: {reason}", ways) from error


def check_regular(path: Path) -> None:
    """Raise `RotationZooError` unless `path` is a regular file that this user may read: reading a
    pipe or a device could block for ever."""
    if not path.exists():
        raise RotationZooError(f"there is no file {path}", hint="check the path")
    if not path.is_file():
        raise RotationZooError(f"{path} is not a regular file", hint="give a file")
    if not os.access(path, os.R_OK):
        raise RotationZooError(f"{path} cannot be read: permission denied", hint="check the path")
