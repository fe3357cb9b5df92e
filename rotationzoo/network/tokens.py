"""Access tokens for the hubs: checked, sent only to the endpoint in use, redacted from output."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from rotationzoo.errors import RotationZooError


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port: the unit to which a credential belongs (RFC 6454)."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), port


def is_at(url: str, endpoints: Iterable[str]) -> bool:
    """Whether a URL has the origin of one of these endpoints."""
    return origin(url) in {origin(endpoint) for endpoint in endpoints}


# Redacted even if no hub is contacted. Other tokens are redacted after `check_token`.
HUGGINGFACE_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_ID_TOKEN")
MODELSCOPE_VARIABLE = "MODELSCOPE_API_TOKEN"
_VARIABLES = (*HUGGINGFACE_VARIABLES, MODELSCOPE_VARIABLE, "ACTIONS_ID_TOKEN_REQUEST_TOKEN")
_USER = re.compile(r"(?<=://)[^\s/?#]*@")  # as in https://user:password@host
_MIN_TOKEN = 4  # characters; shorter strings are part of many ordinary words
_MIN_LINE = 12  # characters; a shorter line of a token may be an ordinary word
_checked: set[str] = set()


def check_token(token: str | None, place: str) -> str | None:
    """The stripped token, or None if it is empty. Raises `RotationZooError`, which does not quote
    it, for characters that are not allowed in an HTTP header (RFC 9110, section 5.5)."""
    token = (token or "").strip()
    if not token:
        return None
    _checked.add(token)  # a refused token is redacted too
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise RotationZooError(
            f"the token in {place} contains an invalid character, such as a space or a line break",
            hint=f"copy the token again, alone and on one line, into {place}",
        )
    return token


def huggingface_token() -> str | None:
    """The token that huggingface_hub would use. Raises as `check_token`."""
    for name in HUGGINGFACE_VARIABLES:
        check_token(os.environ.get(name), name)
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    path = Path(constants.HF_TOKEN_PATH)
    try:
        check_token(path.read_text(encoding="utf-8"), constants.HF_TOKEN_PATH)
    except FileNotFoundError:
        pass
    except UnicodeDecodeError as error:
        raise RotationZooError(f"{path} holds no token", hint="run: hf auth login") from error
    return check_token(huggingface_hub.get_token(), constants.HF_TOKEN_PATH)


def redact(text: str) -> str:
    """The text without known tokens, long lines of tokens, or user names and passwords in URLs."""
    text = _USER.sub("", text)
    tokens = {os.environ.get(name, "") for name in _VARIABLES} | _checked
    words = {token.strip() for token in tokens if len(token.strip()) >= _MIN_TOKEN}
    words |= {line for token in tokens for line in token.split() if len(line) >= _MIN_LINE}
    # Longest first, because one token may begin with another.
    for word in sorted(words, key=len, reverse=True):
        text = text.replace(word, "[token]")
    return text
