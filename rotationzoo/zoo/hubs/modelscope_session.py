"""The ModelScope client's HTTP sessions, with limits on time and size and a token that reaches only
the right hosts."""

import io
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from rotationzoo.errors import HubError
from rotationzoo.network import limits, trust
from rotationzoo.network.limits import NETWORK_HINT

_STORAGE_PREFIXES = ("lfs.", "pre-lfs.", "www.")
_CREDENTIALS = ("Authorization", "Cookie")
_CHUNK_BYTES = 1 << 20


def may_see_token(endpoint: str, url: str) -> bool:
    """Whether a URL is at the endpoint, or at its storage, which needs the token too."""
    return trust.is_at(url, [endpoint]) or trust.is_at_storage(url, endpoint, _STORAGE_PREFIXES)


class LimitedAdapter(HTTPAdapter):
    """Applies the limits to every request of the session that it is mounted on.

    Requests that follow a redirect pass through it too.
    """

    def __init__(self, endpoint: str, reads_all: bool):
        """`reads_all`: read the whole answer here, up to the limit for small answers.

        Otherwise the caller reads the answer and must limit its size.
        """
        super().__init__(max_retries=0)
        self.endpoint, self.reads_all = endpoint, reads_all

    def send(  # type: ignore[override]
        self, request: Any, stream: bool = False, timeout: Any = None, **options: Any
    ) -> requests.Response:
        """Send one request. Our limits replace the client's `stream` and `timeout`."""
        host = urlsplit(request.url).netloc.rpartition("@")[2]
        if not may_see_token(self.endpoint, request.url):
            for name in _CREDENTIALS:
                request.headers.pop(name, None)
        request.headers["Accept-Encoding"] = "identity"
        is_read = request.method in ("GET", "HEAD")
        silence = limits.SILENCE_SECONDS if is_read else limits.UPLOAD_SECONDS
        options |= {"stream": True, "timeout": (limits.CONNECT_SECONDS, silence)}
        plain_send = super().send

        def answer() -> requests.Response:
            response = plain_send(request, **options)
            limits.check_encoding(response.headers, host)
            if self.reads_all or response.is_redirect or not response.ok:
                _read_body(response, host)
            return response

        try:
            return limits.call_within(limits.ANSWER_SECONDS, answer, host) if is_read else answer()
        except (requests.ConnectTimeout, TimeoutError) as error:
            raise HubError(
                f"ModelScope ({host}) did not answer within {limits.ANSWER_SECONDS:g} s",
                hint=NETWORK_HINT,
            ) from error
        except requests.ConnectionError as error:
            # requests has no separate exception types for these two failures.
            if "NewConnectionError" in str(error) or "NameResolutionError" in str(error):
                raise HubError(
                    f"ModelScope ({host}) cannot be reached", hint=NETWORK_HINT
                ) from error
            raise


def _read_body(response: requests.Response, host: str) -> None:
    """Read the whole answer within the limits, and store it where the client will read it."""
    chunks = limits.limit_chunks(
        read_chunks(response), limits.ANSWER_BYTES, host, limits.UPLOAD_SECONDS
    )
    body = b"".join(chunks)
    response.close()
    response.raw = io.BytesIO(body)


def read_chunks(response: requests.Response) -> Iterator[bytes]:
    """The body of an answer in chunks, as they arrive.

    Raises `requests.ConnectionError` if fewer bytes arrive than were announced, and `HubError` if
    the hub is silent for too long.
    """
    raw: Any = response.raw
    announced, count = response.headers.get("Content-Length", ""), 0
    try:
        while chunk := raw.read1(_CHUNK_BYTES):
            count += len(chunk)
            yield chunk
    except urllib3.exceptions.ReadTimeoutError as error:
        raise HubError(
            f"ModelScope sent nothing for {limits.SILENCE_SECONDS:g} s", hint=NETWORK_HINT
        ) from error
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(f"the answer broke off after {count} bytes") from error
    if announced.isdecimal() and count < int(announced):
        raise requests.ConnectionError(f"{count} of {announced} bytes arrived")
