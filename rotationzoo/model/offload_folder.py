"""The scratch folder of weights that are offloaded to disk, which the next run removes if its
process was killed."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "rotationzoo-offload-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# safetensors reports what the disk says as text.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_WORDS = tuple(f"(os error {number})" for number in _FULL)


@contextmanager
def offload_folder() -> Iterator[Path]:
    """Yield a new folder in the system's folder for temporary files, and remove it afterwards.

    The process holds a lock on it. A folder without a lock is of a process that was killed, and is
    removed first: it may be as large as a model.
    """
    _remove_abandoned()
    folder, handle = _make_locked()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error says that there is no room for a file."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(words in str(error) for words in _FULL_WORDS)


def _make_locked() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Another process may have taken it for abandoned before it was locked.
        with suppress(FileNotFoundError):
            handle = os.open(folder, _FLAGS)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder, handle
            os.close(handle)


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # No folder, a link, somebody else's, or locked.
        with suppress(OSError):
            handle = os.open(folder, _FLAGS)
            try:
                if os.fstat(handle).st_uid == os.getuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
