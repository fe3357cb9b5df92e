"""Access tokens of the hubs: checked before they are sent, and redacted from all output."""

import contextlib
import os
import re
from pathlib import Path

from rotationzoo.errors import RotationZooError

# These names are here and not beside each hub, because a token must be redacted even if its hub was
# never contacted. The token of any other hub is redacted once `check_token` has seen it.
HUGGINGFACE_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_ID_TOKEN")
MODELSCOPE_VARIABLE = "MODELSCOPE_API_TOKEN"
_VARIABLES = (*HUGGINGFACE_VARIABLES, MODELSCOPE_VARIABLE, "ACTIONS_ID_TOKEN_REQUEST_TOKEN")
_USER = re.compile(r"(?<=://)[^\s/?#]*@")  # as in https://user:password@host
_MIN_TOKEN = 4  # characters; anything shorter is part of many ordinary words
_MIN_LINE = 12  # characters; a shorter line of a token may be an ordinary word
# Shared by the whole process: a library may quote a token in an error that surfaces anywhere.
_checked: set[str] = set()


def check_token(token: str | None, place: str) -> str | None:
    """Return the token without surrounding white space, or None for an empty one.

    Raises `RotationZooError`, which does not quote the token, for characters that an HTTP header
    cannot carry (RFC 9110, section 5.5).
    """
    token = (token or "").strip()
    if not token:
        return None
    _checked.add(token)  # before it is judged, so that a refused token is redacted, too
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise RotationZooError(
            f"the token in {place} holds a character that no token has, such as a space or a line "
            "break",
            hint=f"copy the token again, alone and on one line, into {place}",
        )
    return token


def forget(token: str) -> None:
    """Stop redacting a token that is used no more. Until then it must stay known: only a known one
    is kept from other hosts."""
    _checked.discard(token)


def huggingface_token() -> str | None:
    """The token that huggingface_hub would use. Raises `RotationZooError` for one that cannot be
    sent."""
    for name in HUGGINGFACE_VARIABLES:
        check_token(os.environ.get(name), name)
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    with contextlib.suppress(FileNotFoundError):
        check_token(_read_token_file(Path(constants.HF_TOKEN_PATH)), constants.HF_TOKEN_PATH)
    return check_token(huggingface_hub.get_token(), constants.HF_TOKEN_PATH)


def _read_token_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RotationZooError(f"{path} holds no token", hint="run: hf auth login") from error


def redact(text: str) -> str:
    """The text without the tokens that this process knows, without any long line of a token, and
    without the names and passwords in its URLs."""
    text = _USER.sub("", text)
    tokens = {os.environ.get(name, "") for name in _VARIABLES} | _checked
    words = {token.strip() for token in tokens if len(token.strip()) >= _MIN_TOKEN}
    words |= {line for token in tokens for line in token.split() if len(line) >= _MIN_LINE}
    # Longest first, because one token may begin with another.
    for word in sorted(words, key=len, reverse=True):
        text = text.replace(word, "[token]")
    return text
