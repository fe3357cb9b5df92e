"""The lock and the markers by which SGLang's servers and calibrations agree on a pair of rotation
files, as `srt/mem_cache/oscar_rotation_paths.py` there computes them.

A server that reads a pair holds a shared lock; who replaces one holds it alone. The markers of a
pair that is half written are for those who replace it file by file; here its folder is replaced
whole.
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
    """Hold the pair's lock alone while the folder of its files is replaced, so that no server reads
    one side of each.

    Raises `RotationZooError` where a server keeps it for longer than locks are waited for.
    """
    pair, _, _ = markers(key, value)
    named = os.environ.get("SGLANG_OSCAR_CALIBRATION_LOCK_DIR")
    locks = Path(named or Path(tempfile.gettempdir()) / "sglang-oscar-locks")
    holder = f"reading or writing {key.parent} (an SGLang server)"
    with locked(locks / f"oscar_{pair}.lock", holder, kept=True):
        yield


def earlier_markers(folder: Path) -> list[str]:
    """Names of the markers in a folder, which say of earlier pairs that they are half written, or
    whole."""
    return [path.name for path in folder.glob(".oscar_*.json")]


def markers(key: Path, value: Path) -> tuple[str, Path, Path]:
    """A pair's id, and the files that say that it is half written, or whole."""
    key_path, value_path = (os.path.realpath(path) for path in (key, value))
    pair = hashlib.sha256(f"K={key_path}\0V={value_path}".encode()).hexdigest()[:16]
    folder = Path(key_path).parent
    pending, complete = (
        folder / f".oscar_{pair}.{state}.json" for state in ("pending", "complete")
    )
    return pair, pending, complete
