"""What tests of the command line ask of a run: its one error, and the files that it left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rotationzoo.recipe import Data
from rotationzoo.storage import files
from support.recipes import QUICK

SMALL = ["--tokens", "2048", "--length", "256"]
TITLE = "\x1b]0;owned\x07"  # sets the title of a terminal's window


def succeeded(result):
    """The run, which did what it was asked to."""
    assert result.returncode == 0, result.stderr
    return result


def only_error(result, code: int = 1) -> str:
    """The run failed with this code, in one `Error:` line and at most one `Hint:` line; returns
    both."""
    assert result.returncode == code, result.stderr
    lines = without_stages(result.stderr.strip())
    assert lines[0].startswith("Error: "), result.stderr
    assert len(lines) <= 2, result.stderr
    assert all(line.startswith("Hint: ") for line in lines[1:]), result.stderr
    assert result.stdout == ""
    return result.stderr


def without_stages(errors: str) -> list[str]:
    """The lines of stderr without those that a slow run writes of its progress."""
    return [line for line in errors.splitlines() if not line.startswith("[")]


def run_apart(program: str, **options) -> tuple[list[str], set[str]]:
    """The lines that a Python program prints in a process of its own, and the modules that it
    imports."""
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules))\n{program}"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, **options)
    *lines, modules = done.stdout.splitlines()
    return lines, set(modules.split())


def stop_once(
    ready: Callable[[], bool], how: int, words: list, folder: Path, environment: dict
) -> tuple[int, str]:
    """Start a process of the command line, and send it the signal `how` as soon as it is ready.
    Returns its exit code and what it wrote to stderr."""
    told = folder.parent / "process-id"
    running = subprocess.Popen(
        [*map(str, words)],
        cwd=folder,
        env={**environment, "PROCESS_ID": str(told)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background of a shell ignores Ctrl-C, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(int(told.read_text()) if told.exists() else running.pid, how)
    _, errors = running.communicate(timeout=60)
    return running.returncode, errors


def left_behind(command) -> list[str]:
    """Every path in the folder that the command ran in."""
    return sorted(str(path.relative_to(command.folder)) for path in command.folder.rglob("*"))


SMALL_RECIPE = QUICK.model_copy(
    update={"data": Data(tokens=1024, length=256), "sink": 8, "recent": 16}
)

# Commands that read an artifact and its rotations, with the rest of their words.
READERS = (
    ("inspect",),
    ("verify",),
    ("report",),
    ("export", "--to", "sglang"),
    ("push", "me/zoo", "--dry-run"),
)


def refused(result) -> str:
    """One sentence and no traceback."""
    assert result.returncode in (1, 2), (result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert [line[:7] for line in lines if line.startswith("Error: ")] == ["Error: "], result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def all_refuse(inside, folder: Path) -> list[str]:
    """What each command says, in one sentence."""
    return [refused(inside(word, folder, *more)) for word, *more in READERS]


@contextmanager
def edited_manifest(folder: Path) -> Iterator[dict]:
    """The content of an artifact's manifest, which is written when the block ends."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def put_file(folder: Path, name: str, data: bytes) -> None:
    """Write a file of an artifact, and have the manifest say that it is right."""
    (folder / name).write_bytes(data)
    with edited_manifest(folder) as content:
        content["files"][name] = {"size": len(data), "sha256": files.digest(data)}
