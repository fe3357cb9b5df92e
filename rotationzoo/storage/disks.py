"""What a disk refuses, in a sentence, and what helps: room, a permission, or another place."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rotationzoo.errors import RotationZooError

_ROOM, _PERMISSION = "make room", "check who may read and write there"
_REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _ROOM,
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "mount it for writing",
}
_AS_TEXT = re.compile(r"\(os error (\d+)\)")  # in errors of safetensors, which have no number


def remedy(error: BaseException | None) -> str | None:
    """What helps against the error of a disk; None for all other errors."""
    number = getattr(error, "errno", None)
    if found := _AS_TEXT.search(str(error)):
        number = int(found[1])
    return _REMEDIES.get(number or 0)


def is_full(error: BaseException | None) -> bool:
    """Whether an error says that there is no room for a file."""
    return remedy(error) == _ROOM


@contextmanager
def disk_errors(path: Path, way_out: str = "choose another place with --output") -> Iterator[None]:
    """Turn the error of a disk into one sentence, whose hint is its remedy or `way_out`, which says
    how to name another place."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        ways = filter(None, (remedy(error), way_out))
        raise RotationZooError(f"{path} cannot be written: {reason}", ", or ".join(ways)) from error
