"""Tokens: what is kept out of everything that is printed, and which addresses may see one.

zoo/hubs/test_hubs.py has those of storage."""

import pytest

from rotationzoo.errors import RotationZooError
from rotationzoo.network import tokens

SECRET = "se-cret-0123456789"


def test_every_line_of_a_token_is_kept_out(monkeypatch):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", f"{SECRET}\nanother-line")
    assert (
        tokens.redact(f"Bearer {SECRET}, another-line; {SECRET!r}")
        == "Bearer [token], [token]; '[token]'"
    )
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", f"{SECRET}\nmore")
    assert tokens.redact(f"no more of {SECRET}") == "no more of [token]"
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "a")
    assert tokens.redact("a word") == "a word"


def test_a_token_that_was_checked_is_kept_out_wherever_it_came_from():
    assert tokens.check_token("  a-third-hubs-token\n", "A_VARIABLE") == "a-third-hubs-token"
    assert tokens.redact("not a-third-hubs-token here") == "not [token] here"
    with pytest.raises(
        RotationZooError, match="the token in A_VARIABLE contains an invalid character"
    ) as error:
        tokens.check_token("two words-of-a-token", "A_VARIABLE")
    assert "two" not in str(error.value)
    assert tokens.check_token(" \n", "A_VARIABLE") is None


def test_an_origin_is_scheme_host_and_port():
    assert tokens.origin("https://Hub.example/a?b") == tokens.origin("https://hub.example:443")
    assert tokens.origin("http://hub.example") == ("http", "hub.example", 80)
    assert tokens.origin("http://user@hub.example:81/x") == ("http", "hub.example", 81)


@pytest.mark.parametrize(
    ("url", "trusted"),
    [
        ("https://hub.example/api", True),
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
