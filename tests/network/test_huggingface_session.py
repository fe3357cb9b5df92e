"""The sessions of huggingface_hub: who uses them is known to them, and to nothing else."""

import huggingface_hub

from rotationzoo.network.huggingface_session import limit_sessions


def test_a_client_that_is_made_anew_has_the_same_limits():
    sessions = limit_sessions()
    huggingface_hub.close_session()
    assert huggingface_hub.get_session().limited_sessions is sessions
    assert limit_sessions() is sessions


def test_no_cookie_of_an_answer_is_kept():
    """A process that acts for several people would send the cookie of one for another."""
    sessions = limit_sessions()
    client, address = sessions.make(), "https://hub.example/api/whoami-v2"
    answer = sessions.httpx.Response(
        200,
        headers={"set-cookie": "token=of-one; Path=/"},
        request=client.build_request("GET", address),
    )
    client.cookies.extract_cookies(answer)
    assert "cookie" not in client.build_request("GET", address).headers
