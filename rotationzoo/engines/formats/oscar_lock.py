"""SGLang's lock on a pair of rotation files, and its markers for half-written and complete pairs.

Their names are computed as in SGLang's `srt/mem_cache/oscar_rotation_paths.py`. A server holds a
shared lock while it reads a pair; a writer holds an exclusive one. The markers are for writers that
replace a pair file by file. Exports replace the whole folder, so they write none.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rotationzoo.storage.locks import locked


@contextmanager
def locked_pair(key: Path, value: Path) -> Iterator[None]:
    """Hold the pair's lock exclusively while its folder is replaced.

    Without it, a server could read one old side and one new side. Raises `RotationZooError` if a
    server holds the lock for longer than the time limit on locks.
    """
    pair, _, _ = markers(key, value)
    named = os.environ.get("SGLANG_OSCAR_CALIBRATION_LOCK_DIR")
    locks = Path(named or Path(tempfile.gettempdir()) / "sglang-oscar-locks")
    holder = f"reading or writing {key.parent} (an SGLang server)"
    with locked(locks / f"oscar_{pair}.lock", holder, kept=True):
        yield


def earlier_markers(folder: Path) -> list[str]:
    """The names of the markers in a folder, which say that earlier pairs are half written or
    complete."""
    return [path.name for path in folder.glob(".oscar_*.json")]


def markers(key: Path, value: Path) -> tuple[str, Path, Path]:
    """A pair's id, the path of its marker for half written, and that for complete."""
    key_path, value_path = (os.path.realpath(path) for path in (key, value))
    pair = hashlib.sha256(f"K={key_path}\0V={value_path}".encode()).hexdigest()[:16]
    folder = Path(key_path).parent
    pending, complete = (
        folder / f".oscar_{pair}.{state}.json" for state in ("pending", "complete")
    )
    return pair, pending, complete
