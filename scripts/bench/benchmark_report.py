"""Measure how long the report page takes, and how large it is.

    python scripts/bench/benchmark_report.py ROTATIONS [OTHER ...]

The page is made from the stored figures of ROTATIONS, with those of the others beside them: in this
process, without importing the libraries; and by the whole command, in a process of its own.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMITS = {"seconds": 2.0, "bytes": 2 << 20}


def main() -> int:
    folders = [Path(word) for word in sys.argv[1:]]
    if not folders:
        print(__doc__, file=sys.stderr)
        return 2
    seconds, size = make_page(folders)
    whole = run_command(folders)
    print(f"{size:,} bytes, {seconds:.2f} s; the whole command {whole:.2f} s")
    return int(seconds > LIMITS["seconds"] or size > LIMITS["bytes"])


def make_page(folders: list[Path]) -> tuple[float, int]:
    """Seconds and bytes of the page, made in this process."""
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.report.page import make_report

    started = time.perf_counter()
    first, *others = map(Artifact.open, folders)
    page = make_report(first, others).html().encode()
    return time.perf_counter() - started, len(page)


def run_command(folders: list[Path]) -> float:
    """Seconds of the command, from the start of its process to its end."""
    words = [sys.executable, "-m", "rotationzoo", "report", str(folders[0])]
    for folder in folders[1:]:
        words += ["--compare", str(folder)]
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        subprocess.run(
            [*words, "-o", f"{scratch}/page.html", "--quiet"], check=True, stdout=subprocess.DEVNULL
        )
        return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
