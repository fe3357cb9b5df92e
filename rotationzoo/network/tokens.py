"""Access tokens of the hubs: read once, checked before a client sees them, and kept out of
everything that is printed."""

import contextlib
import os
import re
from pathlib import Path

from rotationzoo.errors import RotationZooError

HUGGINGFACE = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_ID_TOKEN")
MODELSCOPE = ("MODELSCOPE_API_TOKEN",)
_SHORTEST = 4  # characters of a token; anything shorter is part of many words
_SHORTEST_LINE = 12  # of a line of one, which may be a plain word
_checked: set[str] = set()


def check(token: str | None, place: str) -> str | None:
    """The token without the white space around it; None for an empty one.

    Raises `RotationZooError`, without the token, for what no header may carry (RFC 9110, section
    5.5).
    """
    token = (token or "").strip()
    if not token:
        return None
    _checked.add(token)
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise RotationZooError(
            f"the token in {place} holds a character that no token has, such as a space or a line break",
            hint=f"copy the token again, alone and on one line, into {place}",
        )
    return token


def huggingface() -> str | None:
    """The token that huggingface_hub would use. Raises `RotationZooError` for one that cannot be
    sent."""
    for name in HUGGINGFACE:
        check(os.environ.get(name), name)
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    with contextlib.suppress(FileNotFoundError):
        try:
            check(
                Path(constants.HF_TOKEN_PATH).read_text(encoding="utf-8"), constants.HF_TOKEN_PATH
            )
        except UnicodeDecodeError as error:
            raise RotationZooError(
                f"{constants.HF_TOKEN_PATH} holds no token", hint="run: hf auth login"
            ) from error
    return check(huggingface_hub.get_token(), constants.HF_TOKEN_PATH)


def redact(text: str) -> str:
    """The text without any token that this process knows of, nor any long line of one."""
    values = {os.environ.get(name, "") for name in (*HUGGINGFACE, *MODELSCOPE)} | _checked
    words = {value.strip() for value in values if len(value.strip()) >= _SHORTEST}
    words |= {line for value in values for line in value.split() if len(line) >= _SHORTEST_LINE}
    for word in sorted(words, key=len, reverse=True):
        text = text.replace(word, "[token]")
    return text
