"""Requests that no browser sends to the Space: it refuses them, and waits for nothing for ever."""

import socket
import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from support.space import running_space

pytestmark = pytest.mark.thorough

pytest.importorskip("starlette.requests", reason="it is in the extra `dev`")
pytest.importorskip("uvicorn", reason="it is in the extra `dev`")

HEADERS = {
    "content-security-policy": "frame-ancestors 'self' https://huggingface.co",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
FORM = "Content-Type: application/x-www-form-urlencoded"
HALVES = {
    "nothing": "",
    "half a line": "GET / HT",
    "half a head": "GET / HTTP/1.1\r\nHost: x\r\n",
    "half a form": f"POST /ask HTTP/1.1\r\nHost: x\r\nSec-Fetch-Site: same-origin\r\n{FORM}\r\n"
    "Content-Length: 99\r\n\r\nmodel=",
    "half a body": "GET /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\nmodel=",
}


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    with running_space(tmp_path_factory.mktemp("space") / "log", seconds=2) as running:
        yield running


def connect(space) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", urlsplit(space.address).port), 5)
    connection.settimeout(5)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """What is sent until the other side closes the connection."""
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return received


def send(space, *lines: str, body: str = "") -> tuple[int, str]:
    """Status and text of the answer to a request, after which the connection is closed."""
    head = "\r\n".join([*lines, "Host: x", "Connection: close", f"Content-Length: {len(body)}"])
    with closing(connect(space)) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        answer = read_all(connection).decode()
    return int(answer.split()[1]), answer


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("path", ["/ask", "/sign-out"])
@pytest.mark.parametrize(
    "sender",
    [
        ("Origin: https://evil.example",),
        ("Origin: null",),
        ("Origin: {0}.evil.example",),
        ("Origin: {0}@evil.example",),
        ("Sec-Fetch-Site: cross-site", "Origin: {0}"),
        ("Sec-Fetch-Site: none",),
        (),
    ],
    ids=" ".join,
)
def test_a_form_of_another_site_is_refused(space, path, sender):
    lines = [line.format(space.address) for line in sender]
    status, text = send(space, f"POST {path} HTTP/1.1", FORM, *lines, body="model=a/b")
    assert (status, "sent by another site" in text) == (400, True)


@pytest.mark.parametrize("sender", ["Origin: {0}", "Sec-Fetch-Site: same-origin"])
def test_a_form_of_this_site_is_read(space, sender):
    line = sender.format(space.address)
    status, text = send(space, "POST /ask HTTP/1.1", FORM, line, body="model=a/b")
    assert (status, "Sign in first" in text) == (400, True)


@pytest.mark.parametrize(
    ("path", "form", "status"),
    [
        ("/", None, 200),
        ("/nothing", None, 404),
        ("/ask", None, 405),
        ("/", {}, 405),
        ("/plan?model=x", None, 400),
        ("/sign-in", None, 302),
        ("/plan/", None, 307),
    ],
)
def test_every_answer_has_the_security_headers(space, path, form, status):
    got, headers, _ = space.ask(path, form)
    assert got == status
    assert headers.items() >= HEADERS.items()


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("path", ["/", "/ask"])
def test_nothing_follows_a_request_with_two_lengths(space, path):
    """A proxy may take what follows for the body, and this server for a request, or the other way
    round."""
    first = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    )
    second = "GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
    with closing(connect(space)) as connection:
        connection.sendall(f"{first}\r\n0\r\n\r\n{second}".encode())
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.hostile("size")
def test_half_open_connections_end(space):
    halves = [connect(space) for _ in range(20) for _ in HALVES]
    for connection, half in zip(halves, [*HALVES.values()] * 20, strict=True):
        connection.sendall(half.encode())
    started = time.monotonic()
    for connection in halves:
        connection.settimeout(20)
        read_all(connection)
        connection.close()
    assert time.monotonic() - started < 15, "a form has its own two seconds, and then the rest"
