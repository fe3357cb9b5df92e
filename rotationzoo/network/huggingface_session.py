"""The HTTP client of huggingface_hub, with limits, and with the token only for its endpoint."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.cookiejar import DefaultCookiePolicy
from typing import Any

from rotationzoo.errors import first_sentence
from rotationzoo.network import limits, tokens


class BrokenAnswer(Exception):
    """A connection closed before its answer was complete, and the caller retries failed calls."""


class LimitedSessions:
    """Makes the HTTP clients of huggingface_hub."""

    def __init__(self, plain: Any):
        """`plain`: a client of httpx or of its successor, whichever huggingface_hub uses."""
        self.client_type = type(plain)
        # The client's own library, whose exceptions are the ones to catch in `_send`.
        self.httpx = importlib.import_module(self.client_type.__module__.split(".")[0])
        self.hooks: Mapping[str, list[Callable[[Any], None]]] = plain.event_hooks
        self.stream_type = _limited_stream_type(self.httpx.SyncByteStream)
        # Endpoint, and whether the caller retries; shared with the upload threads of the client.
        self.uses: list[tuple[str, bool]] = []

    def make(self) -> Any:
        """A client like the plain one, with limits added."""
        hooks = {
            **self.hooks,
            "request": [self._prepare, *self.hooks.get("request", [])],
            "response": [*self.hooks.get("response", []), self._limit],
        }
        # `_send` sets the timeouts of each request.
        client = self.client_type(event_hooks=hooks, follow_redirects=True, timeout=None)
        plain_send = client.send
        client.send = lambda request, **options: self._send(plain_send, request, **options)
        # One process may serve several people, who must not share cookies.
        client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        client.limited_sessions = self  # so that `limit_sessions` recognizes its own client
        return client

    @property
    def _caller_retries(self) -> bool:
        return any(retries for _, retries in self.uses)

    def _send(self, plain_send: Callable[..., Any], request: Any, **options: Any) -> Any:
        is_read, host = request.method in ("GET", "HEAD"), request.url.netloc.decode()
        is_small = request.method == "HEAD" or request.url.path.startswith("/api/")
        answer_seconds, httpx = _answer_seconds(request), self.httpx
        timeouts = {
            "connect": limits.CONNECT_SECONDS,
            "read": limits.SILENCE_SECONDS if is_read else limits.UPLOAD_SECONDS,
            "write": limits.UPLOAD_SECONDS,
            "pool": limits.CONNECT_SECONDS,
        }
        extensions = {**request.extensions, "timeout": timeouts}
        if is_small:
            extensions["limit"] = limits.ANSWER_BYTES
        request.extensions = extensions
        try:
            if not (is_read and is_small):
                return plain_send(request, **options)
            return limits.call_within(answer_seconds, lambda: plain_send(request, **options), host)
        except (TimeoutError, httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadTimeout) as error:
            if isinstance(error, httpx.ReadTimeout) and not is_read:
                raise  # the hub may already have carried out the request
            # The only error after which the client does not retry, but reads its cache.
            from huggingface_hub.errors import OfflineModeIsEnabled

            failed = request if isinstance(error, TimeoutError) else error.request
            if (other := failed.url.netloc.decode()) != host:
                host = f"{host} redirected to {other}"
            raise OfflineModeIsEnabled(f"{host}: {error}") from error
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            if self._caller_retries:
                raise BrokenAnswer(f"{host}: {type(error).__name__}") from error
            raise

    def _prepare(self, request: Any) -> None:
        """Ask for an uncompressed answer, and keep our token from other hosts after redirects."""
        request.headers["accept-encoding"] = "identity"
        credential = request.headers.get("authorization", "")
        endpoints = [endpoint for endpoint, _ in self.uses]
        if not endpoints or tokens.is_at(str(request.url), endpoints):
            return
        # Storage hosts have their own credentials: remove only our token.
        if tokens.redact(credential) != credential:
            del request.headers["authorization"]

    def _limit(self, response: Any) -> None:
        request = response.request
        host = request.url.netloc.decode()
        limits.check_encoding(response.headers, host)
        if "retry-after" in response.headers or "ratelimit" in response.headers:
            # Otherwise the client would wait for as long as the hub says.
            response.headers.pop("ratelimit", None)
            response.headers["retry-after"] = "1"
        limit = request.extensions.get("limit")
        if response.has_redirect_location or response.is_error:
            limit = limits.ERROR_BYTES
        if limit is not None:
            response.stream = self.stream_type(response.stream, limit, host)
        if self._caller_retries and is_temporary(response.status_code):
            from huggingface_hub.utils import hf_raise_for_status

            # Raise before the client retries.
            response.read()
            hf_raise_for_status(response)


def is_temporary(status: int) -> bool:
    """Whether a retry may succeed after an answer with this HTTP status."""
    return status in (408, 429) or status >= 500


def limit_sessions() -> LimitedSessions:
    """Apply the limits to huggingface_hub for the rest of this process."""
    import huggingface_hub

    session: Any = huggingface_hub.get_session()
    sessions = getattr(session, "limited_sessions", None)
    if isinstance(sessions, LimitedSessions):
        return sessions
    sessions = LimitedSessions(session)
    huggingface_hub.set_client_factory(sessions.make)
    return sessions


@contextmanager
def asking_huggingface(endpoint: str | None = None, retries: bool = False) -> Iterator[None]:
    """Inside the block, the token is sent only to this endpoint, by default the usual one.
    `retries`: the caller retries failed calls, so huggingface_hub must not."""
    import huggingface_hub

    sessions = limit_sessions()
    use = endpoint or huggingface_hub.constants.ENDPOINT, retries
    sessions.uses.append(use)
    try:
        yield
    finally:
        sessions.uses.remove(use)


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status of the answer that caused an error, or None."""
    return getattr(getattr(error, "response", None), "status_code", None)


def describe_failure(error: BaseException | None) -> str:
    """Why the client did not get a file."""
    from huggingface_hub import constants
    from huggingface_hub.errors import FileMetadataError

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, FileMetadataError):
        return f"{constants.ENDPOINT} does not answer as a hub does ({first_sentence(error)})"
    answer = getattr(error, "response", None)
    if answer is None:
        return f"the hub cannot be reached ({error})"
    asked = answer.request.url.netloc.decode() + answer.request.url.path
    return f"{asked} answered {answer.status_code}"


def _answer_seconds(request: Any) -> float:
    """The time limit for a small answer, which the user or huggingface_hub may change."""
    from huggingface_hub import constants

    longest: float = limits.ANSWER_SECONDS
    if constants.HF_HUB_ETAG_TIMEOUT != constants.DEFAULT_ETAG_TIMEOUT:
        longest = constants.HF_HUB_ETAG_TIMEOUT
    timeouts = request.extensions.get("timeout") or {}
    return min(longest, timeouts.get("read") or longest)


def _limited_stream_type(stream_type: Any) -> Any:
    """A byte stream that raises after a limit, with the base class that the client requires."""

    class LimitedStream(stream_type):  # type: ignore[misc, unused-ignore]
        def __init__(self, stream: Any, limit: int, host: str):
            self.stream, self.limit, self.host = stream, limit, host

        def __iter__(self) -> Iterator[bytes]:
            return limits.limit_chunks(self.stream, self.limit, self.host)

        def close(self) -> None:
            self.stream.close()

    return LimitedStream
