"""Tokens: checked before they are sent, sent only to the endpoint, and never printed."""

import json
import os
import time

import huggingface_hub
import pytest
import requests
from support.cases import quick_first
from support.hubs.hub import Answer
from support.hubs.server import answer, broken
from support.published import ZOO, ok, point_clients, refused

SECRET = "se-cret-0123456789"
VARIABLES = {
    "HF_TOKEN": "huggingface",
    "HUGGING_FACE_HUB_TOKEN": "huggingface",
    "MODELSCOPE_API_TOKEN": "modelscope",
}


@pytest.mark.hostile("values")
@pytest.mark.parametrize(
    "wrong",
    [
        SECRET + "\n" + SECRET[::-1],
        SECRET + " " + SECRET,
        SECRET + "\x07",
        SECRET + "é",
        "\x1b[31m" + SECRET,
    ],
)
@pytest.mark.parametrize("name", VARIABLES)
def test_what_no_header_can_carry_is_not_sent_and_not_printed(zoo, made, monkeypatch, name, wrong):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv(name, wrong)
    started = time.monotonic()
    text = refused(zoo.run("push", made, ZOO, "--to", VARIABLES[name]))
    assert time.monotonic() - started < 3
    assert f"the token in {name}" in text
    assert SECRET not in text
    assert SECRET[::-1] not in text
    assert not zoo.hf.requests + zoo.ms.requests


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("content", [SECRET.encode() + b"\nmore", b"\xff\xfe\x00", b"two words"])
def test_a_token_file_is_held_to_the_same(zoo, made, monkeypatch, tmp_path, content):
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_bytes(content)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    text = refused(zoo.run("push", made, ZOO))
    assert "token" in text
    assert SECRET not in text
    assert not zoo.hf.requests


@pytest.mark.hostile("malformed")
def test_what_a_login_left_behind_is_not_opened(zoo, made, monkeypatch, tmp_path):
    """ModelScope's client unpickles it."""
    monkeypatch.delenv("MODELSCOPE_API_TOKEN")
    folder = tmp_path / "ms-home" / "credentials"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "cookies")
    assert "refused access" in refused(zoo.run("push", made, ZOO, "--to", "modelscope"))
    assert ZOO not in zoo.ms.repositories


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("place", ["huggingface", "modelscope"])
@pytest.mark.parametrize("status", ["401 No", "500 Oh"])
def test_a_hub_that_sends_the_token_back_does_not_have_it_printed(
    zoo, made, monkeypatch, place, status
):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", SECRET)
    message = {"error": SECRET, "Message": f"not {SECRET}", "Code": 1, "message": SECRET}
    body = json.dumps(message).encode()
    said = f"X-Error-Message: {SECRET}\r\nX-Error-Code: {SECRET}\r\nX-Request-Id: {SECRET}\r\n"
    with broken(lambda _: answer(body, said, status)) as server:
        point_clients(monkeypatch, server.endpoint)
        text = refused(zoo.run("push", made, ZOO, "--to", place))
    assert any(SECRET in request for request in server.requests), "it was sent"
    assert SECRET not in text


def test_a_traceback_that_was_asked_for_has_no_token_either(zoo, made, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("ROTATIONZOO_DEBUG", "1")
    with broken(lambda _: answer(b"{}", f"X-Error-Message: {SECRET}\r\n", "403 No")) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        text = zoo.run("push", made, ZOO).stderr
    assert "Traceback" in text
    assert "[token]" in text
    assert SECRET not in text


@pytest.fixture
def listener():
    """Another host, which records its requests."""
    with broken(lambda _: answer(b"{}")) as server:
        yield server


READS = {
    "huggingface": ["/api/models/", "/resolve/"],
    "modelscope": ["/openapi/", "/api/v1/models/", "FilePath"],
}
WRITES = {
    "huggingface": ["/api/repos/create", "/preupload/", "/commit/", ".git/info/lfs"],
    "modelscope": ["/api/v1/models", "/objects/batch", "/commit/", "/revisions", "/repo/tag"],
}


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("kind", quick_first(["port", "name"]))
@pytest.mark.parametrize(
    ("place", "command", "pattern"),
    [
        (place, command, pattern)
        for command, table in (("pull", READS), ("push", WRITES))
        for place in table
        for pattern in table[place]
    ],
)
def test_a_redirect_to_another_host_carries_no_credential(
    zoo, made, listener, monkeypatch, place, command, pattern, kind
):
    hub = zoo.hf if place == "huggingface" else zoo.ms
    if command == "pull":
        ok(zoo.run("push", made, ZOO, "--to", place, "--json"))
    honest = hub.answer
    elsewhere = listener.endpoint if kind == "port" else hub.storage_origin

    def redirect(call):
        if pattern in call.target:
            return Answer(307, b"", {"Location": elsewhere + call.target})
        return honest(call)

    monkeypatch.setattr(hub, "answer", redirect)
    words = ["pull", "demo", "--repo", ZOO, "--from", place]
    if command == "push":
        words = ["push", made, ZOO, "--to", place]
    zoo.run(*words)  # whatever comes of it
    asked = listener.requests if kind == "port" else hub.requests
    followed = [request for request in asked if pattern in request]
    assert followed, "the redirect was met"
    assert not [request for request in listener.requests if hub.token in request]
    assert not hub.leaks, "the hub's own port under another name"


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("place", ["huggingface", "modelscope"])
def test_an_upload_address_elsewhere_gets_no_credential(zoo, made, listener, monkeypatch, place):
    hub = zoo.hf if place == "huggingface" else zoo.ms
    honest = hub.answer

    def foreign(call):
        given = honest(call)
        if call.target.endswith("/objects/batch"):
            for own in (hub.endpoint, hub.storage_origin):
                given.body = given.body.replace(own.encode(), listener.endpoint.encode())
        return given

    monkeypatch.setattr(hub, "answer", foreign)
    zoo.run("push", made, ZOO, "--to", place)
    uploads = [request for request in listener.requests if request.startswith("PUT ")]
    assert uploads
    assert not [request for request in listener.requests if hub.token in request]


def test_the_loopback_hubs_notice_a_token_under_another_name(zoo):
    """So the assertions on leaks above can fail."""
    address = zoo.hf.endpoint.replace("127.0.0.1", "localhost") + "/api/whoami-v2"
    requests.get(address, headers={"Authorization": f"Bearer {zoo.hf.token}"}, timeout=10)
    assert zoo.hf.leaks == ["GET /api/whoami-v2"]
    zoo.hf.leaks.clear()
