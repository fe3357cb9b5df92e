"""A lock file, held by one process at a time."""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rotationzoo.errors import RotationZooError

WAIT = 60.0  # seconds to wait for another process: putting files in place takes less
_PAUSE = 0.05
_SILENCE = 1.0  # seconds of waiting before it is mentioned
log = logging.getLogger(__name__)


@contextmanager
def locked(lock: Path, doing: str, kept: bool = False) -> Iterator[None]:
    """Within the block, this process alone holds the lock file. It is removed at the end, unless it
    is `kept` for others that know its name.

    `doing` is what the other process would be at, in messages: if waiting takes a second, the log
    says so. Raises `RotationZooError` after `WAIT` seconds, and for a link in the lock's place.
    """
    started, mentioned = time.monotonic(), False
    while (handle := _try(lock)) is None:
        waited = time.monotonic() - started
        if waited > WAIT:
            raise RotationZooError(
                f"another process is {doing}; gave up after {WAIT:g} s",
                hint="run the command again when it is done",
            )
        if waited > min(_SILENCE, WAIT / 2) and not mentioned:
            log.warning("Waiting up to %g s for another process that is %s", WAIT, doing)
            mentioned = True
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        # Removed before it is let go: whoever waits sees that the file is gone and makes a new one.
        if not kept:
            lock.unlink(missing_ok=True)
        os.close(handle)


def _try(lock: Path) -> int | None:
    """The open lock file, or None while another process holds it. A handle counts only while it is
    the file of that name: the process before may have removed the file that was opened."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(lock, flags, 0o666)
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
