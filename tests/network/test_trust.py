"""Which addresses may see a token."""

import pytest

from rotationzoo.network.tokens import is_at, is_at_storage, origin


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


@pytest.mark.parametrize(
    ("url", "trusted"),
    [
        ("https://lfs.hub.example/x", True),
        ("https://hub.example/x", True),
        ("https://cdn.hub.example/x", False),
        ("http://lfs.hub.example/x", False),
        ("https://lfs.hub.example.evil.example/x", False),
    ],
)
def test_storage_is_a_named_subdomain_over_https(url, trusted):
    assert is_at_storage(url, "https://www.hub.example", ["lfs."]) is trusted
    assert not is_at_storage(url, "http://hub.example", ["lfs."])
    assert not is_at_storage("https://lfs.hub/x", "https://hub", ["lfs."])
