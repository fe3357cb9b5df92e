"""Tokens as text: what is kept out of everything that is printed."""

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
        RotationZooError, match="the token in A_VARIABLE holds a character"
    ) as error:
        tokens.check_token("two words-of-a-token", "A_VARIABLE")
    assert "two" not in str(error.value)
    assert tokens.check_token(" \n", "A_VARIABLE") is None
