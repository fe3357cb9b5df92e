"""A lock file that one process at a time can hold."""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rotationzoo.errors import RotationZooError

WAIT = 60.0  # seconds to wait for another process, which needs less to put files in place
_PAUSE = 0.05
_ATTEMPTS = 5  # at making the lock's folder, which another process may remove again
_SILENCE = 1.0  # seconds of waiting before the log mentions it
log = logging.getLogger(__name__)


@contextmanager
def locked(lock: Path, doing: str, kept: bool = False) -> Iterator[None]:
    """Hold the lock file while the block runs. The file is removed at the end, unless it is `kept`
    for other programs that know its name.

    `doing` says in messages what the other process is doing. The log mentions it after a second of
    waiting. Raises `RotationZooError` after `WAIT` seconds, and for a symbolic link in the lock's
    place. Raises `OSError` where no file can be made.
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
        # Remove the file before releasing it: a process that has opened it then sees that it is
        # gone, and makes a new one.
        if not kept:
            lock.unlink(missing_ok=True)
        os.close(handle)


def _try(lock: Path) -> int | None:
    """Try once to take the lock. Returns the open lock file, or None while another process holds
    it. The handle counts only if it is still the file of that name: the previous holder may have
    removed the file after it was opened here."""
    try:
        handle = _open(lock)
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


def _open(lock: Path) -> int:
    """Open the lock file, made where there is none. Raises `OSError`.

    A missing folder is made again a few times, because another process may just have removed it. In
    a place such as /proc it is missing every time.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(_ATTEMPTS - 1):
        with suppress(FileNotFoundError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            return os.open(lock, flags, 0o666)
        time.sleep(_PAUSE)
    lock.parent.mkdir(parents=True, exist_ok=True)
    return os.open(lock, flags, 0o666)
