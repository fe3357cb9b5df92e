"""The sessions of the ModelScope client, with limits: whom they tell the token, how long they wait,
how much they read."""

import io
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from rotationzoo.errors import HubError
from rotationzoo.network import limits
from rotationzoo.network.limits import (
    CONNECT,
    LARGE,
    NETWORK,
    SILENCE,
    UPLOAD,
    bounded,
    check_encoding,
    origin,
    within,
)

_SIBLINGS = ("lfs.", "pre-lfs.", "www.")
CHUNK = 1 << 20


def trusts(endpoint: str, url: str) -> bool:
    """Whether an address is the endpoint's own, or that of its storage, which asks for the token
    too."""
    if origin(url) == origin(endpoint):
        return True
    home, host = urlsplit(endpoint), (urlsplit(url).hostname or "").lower()
    base = (home.hostname or "").lower().removeprefix("www.")
    secure = home.scheme == urlsplit(url).scheme == "https"
    return secure and "." in base and host in {base, *(f"{name}{base}" for name in _SIBLINGS)}


class Limits(HTTPAdapter):
    """Mounted on a session, sees every request that leaves it, those to which a redirect leads
    among them.

    `whole` reads a whole answer, which is small; otherwise its reader counts.
    """

    def __init__(self, endpoint: str, whole: bool = True):
        super().__init__(max_retries=0)
        self.endpoint, self.whole = endpoint, whole

    def send(  # type: ignore[override]
        self, request: Any, stream: bool = False, timeout: Any = None, **options: Any
    ) -> requests.Response:
        host = urlsplit(request.url).netloc
        if not trusts(self.endpoint, request.url):
            for name in ("Authorization", "Cookie"):
                request.headers.pop(name, None)
        request.headers["Accept-Encoding"] = "identity"
        reads = request.method in ("GET", "HEAD")
        timeouts = (CONNECT, SILENCE if reads else UPLOAD)

        def answer() -> requests.Response:
            response = super(Limits, self).send(request, stream=True, timeout=timeouts, **options)
            check_encoding(response.headers, host)
            if self.whole or response.is_redirect or not response.ok:
                body = b"".join(bounded(received(response), LARGE, host, UPLOAD))
                response.close()
                response.raw = io.BytesIO(body)
            return response

        try:
            return within(limits.ANSWER, answer, host) if reads else answer()
        except (requests.ConnectTimeout, TimeoutError) as error:
            raise HubError(
                f"ModelScope ({host}) did not answer within {limits.ANSWER:g} s", hint=NETWORK
            ) from error
        except requests.ConnectionError as error:
            if "NewConnectionError" in str(error) or "NameResolutionError" in str(error):
                raise HubError(f"ModelScope ({host}) cannot be reached", hint=NETWORK) from error
            raise


def received(response: requests.Response) -> Any:
    """What arrives, as it arrives. Raises `requests.ConnectionError` for less than was
    announced."""
    raw: Any = response.raw
    announced, count = response.headers.get("Content-Length", ""), 0
    try:
        while chunk := raw.read1(CHUNK):
            count += len(chunk)
            yield chunk
    except urllib3.exceptions.ReadTimeoutError as error:
        raise HubError(f"ModelScope sent nothing for {SILENCE:g} s", hint=NETWORK) from error
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(f"the answer broke off after {count} bytes") from error
    if announced.isdecimal() and count < int(announced):
        raise requests.ConnectionError(f"{count} of {announced} bytes arrived")
