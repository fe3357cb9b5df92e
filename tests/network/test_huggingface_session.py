"""The sessions of huggingface_hub: who uses them is known to them, and to nothing else."""

import huggingface_hub

from rotationzoo.network.huggingface_session import asking_huggingface, limit_sessions


def test_a_client_that_is_made_anew_has_the_same_limits():
    sessions = limit_sessions()
    huggingface_hub.close_session()
    assert huggingface_hub.get_session().limited_sessions is sessions
    assert limit_sessions() is sessions


def test_a_token_is_taken_out_on_the_way_to_another_host(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    client, sessions = huggingface_hub.get_session(), limit_sessions()
    with asking_huggingface("https://hub.example"):
        for url, credential, is_kept in [
            ("https://hub.example/api", "Bearer hf_0123456789", True),
            ("https://evil.example/api", "Bearer hf_0123456789", False),
            ("https://storage.example/x", "Basic of-the-storage", True),
        ]:
            request = client.build_request("GET", url, headers={"authorization": credential})
            sessions._prepare(request)
            assert ("authorization" in request.headers) == is_kept, url


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
