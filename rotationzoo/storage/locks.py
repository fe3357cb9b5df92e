"""A lock file that one process at a time can hold.

`filelock` (4.0) is no substitute: it empties whatever file stands in the lock's place, which may be
a hard link, waits for a minute where no file can be made, and takes a lock that outlives its
process on file systems without `flock`.
"""

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
def locked(lock: Path, doing: str) -> Iterator[None]:
    """Hold the lock file while the block runs. `doing` says in messages, and after a second in the
    log, what the other process is doing. Raises `RotationZooError` after `WAIT` seconds, and for a
    symbolic link in the lock's place; `OSError` where no file can be made. Folders that were made
    for the lock are removed with it, unless they hold something by then."""
    missing = [folder for folder in lock.absolute().parents if not folder.exists()]
    started, mentioned = time.monotonic(), False
    while (handle := _try(lock)) is None:
        waited = time.monotonic() - started
        if waited > WAIT:
            hint = "run the command again when it is done"
            raise RotationZooError(f"another process is {doing}; gave up after {WAIT:g} s", hint)
        if waited > min(_SILENCE, WAIT / 2) and not mentioned:
            log.warning("Waiting up to %g s for another process that is %s", WAIT, doing)
            mentioned = True
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        # Remove the file before releasing it: a process that has opened it then sees that it is
        # gone, and makes a new one.
        lock.unlink(missing_ok=True)
        os.close(handle)
        with suppress(OSError):
            for folder in missing:
                folder.rmdir()


def _try(lock: Path) -> int | None:
    """The open lock file, or None while another process holds it. The handle counts only if it is
    still the file of that name, which the previous holder may have removed meanwhile."""
    try:
        handle = _open(lock)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        hint = "remove it"
        raise RotationZooError(f"{lock} is a symbolic link, and no lock is one", hint) from error
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
    """Open the lock file, made where there is none. A missing folder is made again a few times,
    because another process may just have removed it. Raises `OSError`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    attempts = _ATTEMPTS
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            return os.open(lock, flags, 0o666)
        except FileNotFoundError:  # in a place such as /proc, every time
            attempts -= 1
            if not attempts:
                raise
        time.sleep(_PAUSE)
