"""Which addresses may see a token; zoo/hubs/test_modelscope_session.py has those of storage."""

import pytest

from rotationzoo.network.tokens import is_at, origin


def test_an_origin_is_scheme_host_and_port():
    assert origin("https://Hub.example/a?b") == origin("https://hub.example:443")
    assert origin("http://hub.example") == ("http", "hub.example", 80)
    assert origin("http://user@hub.example:81/x") == ("http", "hub.example", 81)


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
    assert is_at(url, ["https://hub.example", "https://mirror.example:8443"]) is trusted
    assert not is_at(url, [])
