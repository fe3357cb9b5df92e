"""Plans for a model of the hub: `rotationzoo plan` in a process of its own, within limits.

A config that a stranger wrote may ask for any number of layers. So each plan is made by another
process, which may take so many seconds and so much memory, has no token, and leaves no file.
"""

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from rotationzoo.capacity.cards import CARDS
from rotationzoo.errors import RotationZooError, UsageError

CONTEXTS = (8192, 32768, 131072, 524288, 1048576)
GPUS = tuple(CARDS)
USUAL = {"gpu": "H100", "context": 131072}
"""What is chosen until a visitor chooses."""
# A hub id in ASCII. It has an owner, so it is never `demo`; it begins with a letter or a digit, so
# it is never an option or a path.
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FRESH = 600  # seconds; a plan is not made again in the same ten minutes
_SECONDS = 60
_PATIENCE = 10  # seconds for which a visitor waits for others
_LIMITS = {
    resource.RLIMIT_CPU: 30,  # a model that is built on `meta` took 6 s
    resource.RLIMIT_AS: 8 << 30,  # torch alone maps 3 GiB
    resource.RLIMIT_FSIZE: 64 << 20,  # of a config or an index of weights
}
_PASSED_ON = ("PATH", "PYTHONPATH", "LANG", "HF_ENDPOINT", "SSL_CERT_FILE")
_slots = threading.BoundedSemaphore(2)
_queue = threading.BoundedSemaphore(12)  # of 40 threads; the others serve the other pages


def check_model(text: str) -> str:
    """The hub id that a visitor typed. Raises `UsageError` for anything else."""
    name = text.strip().removeprefix("https://huggingface.co/").rstrip("/")
    if not _MODEL.fullmatch(name) or ".." in name or "--" in name:
        raise UsageError(
            "that is no model of the hub", hint="write it as owner/name: Qwen/Qwen3-8B"
        )
    return name


def make_plan(model: str, gpu: str, context: int) -> dict[str, Any]:
    """What `rotationzoo plan --json` says of a model. Raises `RotationZooError`."""
    model = check_model(model)
    if gpu not in GPUS or context not in CONTEXTS:
        raise UsageError("that GPU or context is not offered", hint="choose one of the lists")
    return _plan(model, gpu, context, int(time.monotonic() // _FRESH))


@lru_cache(maxsize=256)
def _plan(model: str, gpu: str, context: int, period: int) -> dict[str, Any]:
    with _taking(_queue, 0), _taking(_slots, _PATIENCE):
        return _run("plan", model, "--gpu", gpu, "--context", str(context), "--json")


@contextlib.contextmanager
def _taking(places: threading.Semaphore, seconds: float) -> Iterator[None]:
    """One of some places while the block runs. Raises `RotationZooError` if none becomes free."""
    if not places.acquire(timeout=seconds):
        raise RotationZooError("others are waiting for their plans", hint="try again in a minute")
    try:
        yield
    finally:
        places.release()


def _run(*words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "rotationzoo", *words],
            cwd=folder,  # which is empty, so no model's name is that of a folder
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        _limit(process.pid)
        try:
            answer, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise RotationZooError(
                f"the plan took longer than {_SECONDS} s", hint="make it on your own machine"
            ) from error
    return _read(answer)


def _environment(folder: str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    own = {"HOME": folder, "HF_HOME": folder, "OMP_NUM_THREADS": "1"}
    return {**passed, **own, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}


def _limit(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        for what, most in _LIMITS.items():
            resource.prlimit(pid, what, (most, most))


def _read(answer: bytes) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(answer)
    except ValueError as error:
        raise RotationZooError(
            "the plan was given up: it took too much memory or time",
            hint="make it on your own machine",
        ) from error
    if "error" in content:
        raise RotationZooError(content["error"])
    return content
