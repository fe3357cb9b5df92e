"""Tokens: redaction, and the addresses that may see one (those of storage: zoo/hubs/test_hubs)."""

import pytest

from rotationzoo.errors import RotationZooError
from rotationzoo.network import tokens

SECRET = "se-cret-0123456789"


@pytest.mark.parametrize(
    ("token", "text", "redacted"),
    [
        (f"{SECRET}\nanother-line", f"{SECRET}, another-line; {SECRET!r}", "*, *; '*'"),
        (f"{SECRET}\nmore", f"no more of {SECRET}", "no more of *"),
        ("a", "a word", "a word"),
    ],
)
def test_every_line_of_a_token_is_redacted(monkeypatch, token, text, redacted):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", token)
    assert tokens.redact(text) == redacted.replace("*", "[token]")


def test_a_checked_token_is_redacted_wherever_it_came_from():
    assert tokens.check_token("  a-third-hubs-token\n", "A_VARIABLE") == "a-third-hubs-token"
    assert tokens.redact("not a-third-hubs-token here") == "not [token] here"
    says = "the token in A_VARIABLE contains an invalid character"
    with pytest.raises(RotationZooError, match=says) as error:
        tokens.check_token("two words-of-a-token", "A_VARIABLE")
    assert "two" not in str(error.value)
    assert tokens.check_token(" \n", "A_VARIABLE") is None


@pytest.mark.parametrize(
    ("url", "trusted"),
    [
        ("https://user@Hub.example:443/api?b", True),
        ("https://mirror.example:8443/api", True),
        ("https://mirror.example/api", False),
        ("http://hub.example/api", False),
        ("https://hub.example.evil.example/api", False),
        ("https://hub.example@evil.example/api", False),
    ],
)
def test_only_the_origins_of_the_endpoints_are_trusted(url, trusted):
    assert tokens.is_at(url, ["https://hub.example", "https://mirror.example:8443"]) is trusted
    assert not tokens.is_at(url, [])
