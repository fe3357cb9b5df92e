"""The sessions of huggingface_hub."""

import huggingface_hub

from rotationzoo.network.huggingface_session import limit_sessions


def test_a_client_that_is_made_anew_has_the_same_limits():
    sessions = limit_sessions()
    huggingface_hub.close_session()
    assert huggingface_hub.get_session().limited_sessions is sessions
    assert limit_sessions() is sessions


def test_no_cookie_of_an_answer_is_kept():
    """A process for several people would send the cookie of one of them for another."""
    sessions = limit_sessions()
    client, address = sessions.make(), "https://hub.example/api/whoami-v2"
    cookie, request = {"set-cookie": "token=a; Path=/"}, client.build_request("GET", address)
    client.cookies.extract_cookies(sessions.httpx.Response(200, headers=cookie, request=request))
    assert "cookie" not in client.build_request("GET", address).headers
