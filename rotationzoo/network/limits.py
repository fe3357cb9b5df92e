"""What a hub may cost: seconds until it answers, bytes of an answer, and who is told the token.

The clients of the hubs wait for ever, or for minutes, and read whatever comes. Here their sessions
get limits, through the clients' own hooks for that; a call that fails for want of a network is not
repeated.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rotationzoo.errors import HubError, RotationZooError

T = TypeVar("T")
CONNECT = 4.0  # seconds
ANSWER = 6.0  # seconds for a whole small answer, with the look-up of the name and the connection
PATIENCE = 1.5  # seconds until somebody who waits is told what for
SILENCE = 10.0  # seconds without a byte of a file
UPLOAD = 60.0  # seconds without a word from a hub that was sent something
SMALL = 1 << 20  # bytes of an error or a redirect
LARGE = 16 << 20  # bytes of a listing or an index
SLOWEST = 32 << 10  # bytes a second, below which a file is given up
NETWORK = "check the network, then run the same command again"


class BrokenAnswer(Exception):
    """A connection that ended before its answer did, where the client would have repeated the call
    by itself."""


def within(seconds: float, call: Callable[[], T], what: str) -> T:
    """The result of a call, or `TimeoutError` when it takes longer; the call is then left to
    itself.

    A thread, because neither the look-up of a name nor an answer that trickles in heeds a socket's
    timeout.
    """
    outcome: list[Any] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.extend((True, context.run(call)))
        except BaseException as error:
            outcome.extend((False, error))

    thread = threading.Thread(target=run, daemon=True, name=f"rotationzoo: {what}")
    thread.start()
    thread.join(min(PATIENCE, seconds))
    if not outcome:
        _say_waiting(what)
        thread.join(max(0.0, seconds - PATIENCE))
    if not outcome:
        raise TimeoutError(f"{what} did not answer within {seconds:g} s")
    succeeded, value = outcome
    if not succeeded:
        raise value
    return value


@cache
def _say_waiting(what: str) -> None:
    logging.getLogger("rotationzoo").warning("Waiting for %s", what)


def bounded(
    chunks: Iterable[bytes], limit: int, what: str, seconds: float | None = None
) -> Iterator[bytes]:
    """The chunks, up to `limit` bytes and within so many seconds. Raises `HubError` past either."""
    received, started = 0, time.monotonic()
    for chunk in chunks:
        received += len(chunk)
        if received > limit:
            raise HubError(
                f"{what} sent more than {limit:,} bytes", hint="tell the owners of that server"
            )
        if seconds is not None and time.monotonic() - started > seconds:
            raise HubError(
                f"{what} sent no more than {received:,} bytes in {seconds:.0f} s", hint=NETWORK
            )
        yield chunk


def save(chunks: Iterable[bytes], path: Path, size: int, what: str) -> None:
    """Write a file of at most `size` bytes, which may take as long as the slowest line that is
    waited for.

    Raises `HubError` for a larger file or a slower line, and `RotationZooError` where the disk
    refuses.
    """
    limited = bounded(chunks, size, what, ANSWER + size / SLOWEST)
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    with file:
        for chunk in limited:
            with _disk_errors(path):
                file.write(chunk)
                file.flush()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RotationZooError(
            f"{path.name} cannot be written: {error.strerror}", hint="make room on the disk"
        ) from error


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port: what a credential is given to."""
    parts = urlsplit(url)
    return (
        parts.scheme,
        (parts.hostname or "").lower(),
        parts.port or {"http": 80, "https": 443}.get(parts.scheme),
    )


def check_encoding(headers: Any, what: str) -> None:
    """Raise `HubError` for a compressed body, which was not asked for: its size says nothing of
    what it becomes."""
    if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise HubError(
            f"{what} sent a compressed answer, which was not asked for",
            hint="tell the owners of that server",
        )


_asked: list[str] = []
"""Endpoints that are being asked, for every thread: the client uploads in threads of its own."""


_repeated: list[bool] = []
"""Whether those who ask repeat a call themselves."""


@contextmanager
def asking_huggingface(endpoint: str | None = None, repeated: bool = False) -> Iterator[None]:
    """Inside the block the token is sent to this endpoint alone, wherever an answer points; None
    for the usual one.

    `repeated`: the caller repeats what fails, and the client, which would for 23 seconds each time,
    does not.
    """
    import huggingface_hub

    limit_huggingface()
    address = endpoint or huggingface_hub.constants.ENDPOINT
    _asked.append(address)
    _repeated.append(repeated)
    try:
        yield
    finally:
        _asked.remove(address)
        _repeated.remove(repeated)


def limit_huggingface() -> None:
    """Give the sessions of huggingface_hub these limits, from now on and in the whole process."""
    import huggingface_hub

    session: Any = huggingface_hub.get_session()
    if getattr(session, "limited", False):
        return
    kind, hooks = _limited(type(session)), {**session.event_hooks}
    hooks["request"] = [kind.prepare, *hooks.get("request", [])]
    hooks["response"] = [*hooks.get("response", []), kind.limit]
    options = {"event_hooks": hooks, "follow_redirects": True, "timeout": None}
    huggingface_hub.set_client_factory(lambda: kind(**options))


def _limited(base: Any) -> Any:
    """A client like `base`, httpx's or its successor's, whichever huggingface_hub uses."""
    import importlib

    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import hf_raise_for_status

    from rotationzoo.network import tokens

    httpx = importlib.import_module(base.__module__.split(".")[0])

    stream: Any = httpx.SyncByteStream

    class Body(stream):
        def __init__(self, stream: Any, limit: int, what: str):
            self.stream, self.limit, self.what = stream, limit, what

        def __iter__(self) -> Iterator[bytes]:
            return bounded(self.stream, self.limit, self.what)

        def close(self) -> None:
            self.stream.close()

    class Limited(base):
        limited = True

        def send(self, request: Any, **options: Any) -> Any:
            reads, host = request.method in ("GET", "HEAD"), request.url.netloc.decode()
            small = request.method == "HEAD" or request.url.path.startswith("/api/")
            wished, given = constants.HF_HUB_ETAG_TIMEOUT, request.extensions.get("timeout") or {}
            longest = ANSWER if wished == constants.DEFAULT_ETAG_TIMEOUT else wished
            answer = min(longest, given.get("read") or longest)
            read = SILENCE if reads else UPLOAD
            timeout = {"connect": CONNECT, "read": read, "write": UPLOAD, "pool": CONNECT}
            limit = {"limit": LARGE} if small else {}
            request.extensions = {**request.extensions, "timeout": timeout, **limit}
            call = super().send
            try:
                if reads and small:
                    return within(answer, lambda: call(request, **options), host)
                return call(request, **options)
            except (
                TimeoutError,
                httpx.ConnectError,
                httpx.ConnectTimeout,
                httpx.ReadTimeout,
            ) as error:
                if isinstance(error, httpx.ReadTimeout) and not reads:
                    raise  # it may have been carried out
                # Of all that the client knows, this it does not repeat, and looks into its cache.
                raise OfflineModeIsEnabled(f"{host}: {error}") from error
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if any(_repeated):
                    raise BrokenAnswer(f"{host}: {type(error).__name__}") from error
                raise

        @staticmethod
        def prepare(request: Any) -> None:
            request.headers["accept-encoding"] = "identity"
            said = request.headers.get("authorization", "")
            foreign = _asked and origin(str(request.url)) not in map(origin, _asked)
            if foreign and tokens.redact(said) != said:
                del request.headers["authorization"]

        @staticmethod
        def limit(response: Any) -> None:
            request = response.request
            what = request.url.netloc.decode()
            check_encoding(response.headers, what)
            if "retry-after" in response.headers or "ratelimit" in response.headers:
                response.headers.pop("ratelimit", None)
                response.headers["retry-after"] = (
                    "1"  # the client would wait for as long as it is told
                )
            limit = request.extensions.get("limit")
            if response.has_redirect_location or response.is_error:
                limit = SMALL
            if limit is not None:
                response.stream = Body(response.stream, limit, what)
            if any(_repeated) and (
                response.status_code in (408, 429) or response.status_code >= 500
            ):
                response.read()
                hf_raise_for_status(response)

    return Limited
