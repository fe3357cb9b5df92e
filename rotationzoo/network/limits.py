"""Limits on how long a hub may take and how many bytes it may send. The hubs' own clients wait for
minutes or forever, and read everything."""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from rotationzoo.errors import HubError
from rotationzoo.storage.files import disk_errors

T = TypeVar("T")
CONNECT_SECONDS = 4.0
ANSWER_SECONDS = 6.0  # for a whole small answer, including the DNS look-up
NOTICE_SECONDS = 1.5  # until the user is told which host the command waits for
SILENCE_SECONDS = 10.0  # without a byte of a download
UPLOAD_SECONDS = 60.0  # without a reply or progress while the hub is sent something
ERROR_BYTES = 1 << 20  # of an error or a redirect
ANSWER_BYTES = 16 << 20  # of a listing or an index
SLOWEST_BYTES_PER_SECOND = 32 << 10  # slower downloads are given up
NETWORK_HINT = "check the network, then run the same command again"
_OWNERS_HINT = "tell the owners of that server"
# Cached, so that each host is named once, however many calls wait for it.
_say_once = cache(logging.getLogger("rotationzoo").warning)


def call_within(seconds: float, call: Callable[[], T], host: str) -> T:
    """The result of a call. It runs in its own thread, because a socket's timeout covers neither
    the DNS look-up nor a slow trickle of bytes. Raises `TimeoutError` after `seconds`, and leaves
    the call running."""
    future, context = Future[T](), contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:
            future.set_exception(error)

    # A daemon, so that an abandoned call does not keep the program from exiting.
    thread = threading.Thread(target=run, daemon=True, name=f"rotationzoo: {host}")
    thread.start()
    if not wait([future], min(NOTICE_SECONDS, seconds)).done:
        _say_once("Waiting for %s", host)
        if not wait([future], max(0.0, seconds - NOTICE_SECONDS)).done:
            raise TimeoutError(f"{host} did not answer within {seconds:g} s")
    return future.result()


def limit_chunks(
    chunks: Iterable[bytes], limit: int, what: str, seconds: float | None = None
) -> Iterator[bytes]:
    """Pass on the chunks of an answer. Raises `HubError` after `limit` bytes or `seconds`."""
    received, started = 0, time.monotonic()
    for chunk in chunks:
        received += len(chunk)
        if received > limit:
            raise HubError(f"{what} sent more than {limit:,} bytes", _OWNERS_HINT)
        if seconds is not None and time.monotonic() - started > seconds:
            slow = f"{what} sent only {received:,} bytes in {seconds:.0f} s"
            raise HubError(slow, NETWORK_HINT)
        yield chunk


def save_chunks(
    chunks: Iterable[bytes], path: Path, size: int, what: str, headers: Mapping[str, str]
) -> None:
    """Write the chunks of an answer with these headers to a file of at most `size` bytes. Raises
    `HubError` for a larger file or a slower connection, and `RotationZooError` for a disk error."""
    stated = headers.get("content-length", "")
    if stated.isdecimal() and len(stated) < 20:  # Python refuses to read a number of any length
        size = min(size, int(stated))
    seconds = ANSWER_SECONDS + size / SLOWEST_BYTES_PER_SECOND
    # Name only the file: its folder may be temporary.
    writing = partial(disk_errors, Path(path.name), "use a larger disk")
    with writing():
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    with file:
        # Reading is outside `writing`, which would blame the disk for network errors.
        for chunk in limit_chunks(chunks, size, what, seconds):
            with writing():
                file.write(chunk)
                file.flush()  # so that a full disk shows here, not on close


def check_encoding(headers: Any, what: str) -> None:
    """Raise `HubError` for a compressed body, which may unpack to any size."""
    if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise HubError(f"{what} sent a compressed answer without being asked", _OWNERS_HINT)
