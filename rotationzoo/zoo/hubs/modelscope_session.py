"""The sessions of the ModelScope client, with limits, and with the token sent to the right host
only."""

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
    """Whether an address is the endpoint's own, or that of its storage, which asks for the token
    too."""
    return trust.is_at(url, [endpoint]) or trust.is_at_storage(url, endpoint, _STORAGE_PREFIXES)


class LimitedAdapter(HTTPAdapter):
    """Mounted on a session, sends every request that leaves it, including those to which a redirect
    leads."""

    def __init__(self, endpoint: str, reads_all: bool):
        """`reads_all`: read all of an answer, which is small. Otherwise whoever reads the answer
        limits it."""
        super().__init__(max_retries=0)
        self.endpoint, self.reads_all = endpoint, reads_all

    def send(  # type: ignore[override]
        self, request: Any, stream: bool = False, timeout: Any = None, **options: Any
    ) -> requests.Response:
        """`stream` and `timeout` are the client's wishes, which the limits replace."""
        host = urlsplit(request.url).netloc
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
            # requests has no type of its own for these two.
            if "NewConnectionError" in str(error) or "NameResolutionError" in str(error):
                raise HubError(
                    f"ModelScope ({host}) cannot be reached", hint=NETWORK_HINT
                ) from error
            raise


def _read_body(response: requests.Response, host: str) -> None:
    """Read all of an answer, within the limits, and put it where the client will read it."""
    chunks = limits.limit_chunks(
        read_chunks(response), limits.ANSWER_BYTES, host, limits.UPLOAD_SECONDS
    )
    body = b"".join(chunks)
    response.close()
    response.raw = io.BytesIO(body)


def read_chunks(response: requests.Response) -> Iterator[bytes]:
    """The body of an answer, as it arrives. Raises `requests.ConnectionError` if less arrives than
    was announced."""
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
