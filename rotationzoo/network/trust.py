"""Which URLs may receive an access token: those of the endpoint in use, and no others."""

from collections.abc import Iterable
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port: the unit to which a credential belongs (RFC 6454)."""
    parts = urlsplit(url)
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), port


def is_at(url: str, endpoints: Iterable[str]) -> bool:
    """Whether a URL has the origin of one of these endpoints."""
    return origin(url) in {origin(endpoint) for endpoint in endpoints}


def is_at_storage(url: str, endpoint: str, prefixes: Iterable[str]) -> bool:
    """Whether a URL is on the endpoint's own domain, or on a subdomain with one of these prefixes,
    such as `lfs.`. Both must use HTTPS."""
    home, parts = urlsplit(endpoint), urlsplit(url)
    if not home.scheme == parts.scheme == "https":
        return False
    domain = (home.hostname or "").lower().removeprefix("www.")
    hosts = {domain, *(f"{prefix}{domain}" for prefix in prefixes)}
    # A name without a dot is a host on the local network, which has no subdomains.
    return "." in domain and (parts.hostname or "").lower() in hosts
