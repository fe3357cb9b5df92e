"""Hubs with invalid answers: one sentence for each, in time, and no more bytes than announced."""

import json
import socket
import time
from functools import partial

import huggingface_hub
import pytest
from support.cases import quick_first
from support.hubs.hub import Answer, Fault
from support.hubs.server import answer, black_hole, broken, endless, trickle
from support.published import ZOO, nothing_left, point_clients, publish_oscar_pair, refused

COMMIT = b"0123456789" * 4
HTML = b"<!doctype html><title>Sign in to this network</title>"
OK = b"HTTP/1.1 200 OK\r\n"
TYPES = b'{"id": 7, "sha": ["x"], "siblings": 3, "data": 4, "Data": 5, "Code": {}}'
ANSWERS = {
    "nothing": lambda _: [],
    "no-status-line": lambda _: [b"\x00\xff\x00 hub\r\n\r\n"],
    "escapes": lambda _: [b"HTTP/1.1 500 \x1b]0;owned\x07\r\n\r\n"],
    "html": lambda _: answer(HTML, "Content-Type: text/html\r\n"),
    "no-json": lambda _: answer(b"{not json"),
    "no-utf-8": lambda _: answer(b'{"sha": "\xff\xfe"}'),
    "truncated": lambda _: [OK + b"Content-Length: 1000\r\n\r\n", b'{"sha": '],
    "a-list": lambda _: answer(b"[1, 2, 3]"),
    "types": lambda _: answer(TYPES),
    "a-sha-that-is-a-path": lambda _: answer(
        b'{"id": "a/b", "sha": "../../../escaped", "data": [], "Data": "x"}'
    ),
    "nested": lambda _: answer(b"[" * 100_000),
    "compressed": lambda _: answer(b"\x1f\x8b\x08", "Content-Encoding: gzip\r\n"),
    "redirected-for-ever": lambda _: answer(
        b"", "Location: /api/models/again/again\r\n", "302 Found"
    ),
    "redirected-to-a-file": lambda _: answer(b"", "Location: file:///etc/passwd\r\n", "302 Found"),
    "a-wait-of-a-day": lambda _: answer(b"{}", "Retry-After: 86400\r\n", "429 Too Many Requests"),
    "without-end": lambda _: endless(OK + b"\r\n", b"[" * 65536),
    "an-error-without-end": lambda _: endless(b"HTTP/1.1 500 Oh\r\n\r\n", b"x" * 65536),
    "headers-without-end": lambda _: endless(OK, b"X-More: " + b"x" * 60_000 + b"\r\n"),
}


@pytest.fixture
def pointed(zoo, monkeypatch):
    """Point both clients at another server."""
    return partial(point_clients, monkeypatch)


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("place", quick_first(["huggingface", "modelscope"]))
@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_that_is_none_is_one_sentence(zoo, pointed, place, what):
    with broken(ANSWERS[what]) as server:
        pointed(server.endpoint)
        started = time.monotonic()
        text = refused(zoo.run("pull", "demo", "--repo", ZOO, "--from", place))
    assert server.requests
    assert time.monotonic() - started < 10
    assert "Hint: " in text
    assert ZOO in text or server.endpoint.removeprefix("http://") in text, "it says which hub"
    assert server.sent < 200 << 20
    assert nothing_left(zoo)


@pytest.fixture
def refused_with(zoo, listed, pointed):
    """The error of a command on a hub with a false answer for one file of an artifact, and the
    number of bytes that the hub sent."""
    files = zoo.hf.files(ZOO)

    def run(name: str, lie, *words) -> tuple[str, int]:
        def respond(request: str) -> object:
            target = request.split(" ")[1].split("?")[0]
            if target.startswith("/api/"):
                return answer(b'{"id": "someone/zoo", "sha": "' + COMMIT + b'"}')
            path = target.split("/resolve/")[1].split("/", 1)[1]
            if path not in files:
                code = "X-Error-Code: EntryNotFound\r\n"
                return answer(b"", code, status="404 Not Found")
            return lie() if path.endswith(name) else answer(files[path])

        with broken(respond) as server:
            pointed(server.endpoint)
            return refused(zoo.run(*words, "--repo", ZOO)), server.sent

    return run


@pytest.mark.hostile("size")
@pytest.mark.parametrize(
    "announced", ["", "Content-Length: 268000\r\n", f"Content-Length: {1 << 40}\r\n"]
)
def test_no_more_is_written_than_the_index_says(zoo, made, refused_with, announced):
    start = OK + announced.encode() + b"\r\n"
    size = (made / "rotations.safetensors").stat().st_size
    lie = "rotations.safetensors", lambda: endless(start, b"\0" * 65536)
    text, sent = refused_with(*lie, "pull", "demo")
    assert sent < size + (32 << 20), "what sockets hold, and no more"
    assert f"sent more than {size:,} bytes" in text or "sha256 differs" in text
    assert nothing_left(zoo)


@pytest.mark.hostile("size")
def test_a_file_that_never_comes_to_its_end_is_given_up(zoo, refused_with, monkeypatch):
    monkeypatch.setattr("rotationzoo.network.limits.ANSWER_SECONDS", 1.0)
    monkeypatch.setattr("rotationzoo.network.limits.SLOWEST_BYTES_PER_SECOND", 1 << 40)
    started = time.monotonic()
    lie = "rotations.safetensors", lambda: trickle(OK + b"\r\n", 0.1)
    text, _ = refused_with(*lie, "pull", "demo")
    assert "bytes in 1 s" in text
    assert time.monotonic() - started < 5
    assert nothing_left(zoo)


@pytest.mark.hostile("size")
def test_an_index_of_any_size_is_not_read(refused_with):
    lie = "zoo_index.json", lambda: endless(OK + b"\r\n", b"[" * 65536)
    text, _ = refused_with(*lie, "list")
    assert "zoo_index.json of someone/zoo on Hugging Face sent more than 16,777,216" in text


@pytest.mark.hostile("size")
def test_sizes_are_added_up_before_anything_is_fetched(zoo, listed):
    content = json.loads(listed.read_text())
    content["entries"][0]["files"]["statistics.safetensors"]["size"] = 1 << 60
    listed.write_text(json.dumps(content))
    requests = len(zoo.hf.requests)
    assert "MB are needed" in refused(zoo.run("pull", "demo", "--index", listed))
    assert len(zoo.hf.requests) == requests, "a pinned revision, and no room"
    assert nothing_left(zoo)


@pytest.mark.hostile("size")
def test_a_file_without_a_size_in_the_index_has_a_limit(zoo, tmp_path, monkeypatch):
    publish_oscar_pair(zoo, tmp_path)
    monkeypatch.setattr("rotationzoo.zoo.pull.MAX_BYTES", 1000)
    assert "sent more than 1,000 bytes" in refused(zoo.run("pull", "Qwen/Qwen3-8B"))
    assert nothing_left(zoo)


@pytest.fixture(scope="module")
def closed() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


COMMANDS = [
    ["calibrate", "some/model", "--dry-run"],
    ["list"],
    ["pull", "Qwen/Qwen3-8B"],
    ["list", "--from", "modelscope"],
]


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_where_nothing_listens_the_answer_comes_at_once(zoo, pointed, closed, words):
    pointed(closed)
    started = time.monotonic()
    assert "cannot be reached" in refused(zoo.run(*words))
    assert time.monotonic() - started < 3


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_where_nobody_answers_it_says_whom_it_waits_for(zoo, pointed, words, monkeypatch):
    for name, seconds in {"ANSWER_SECONDS": 0.4, "NOTICE_SECONDS": 0.1}.items():
        monkeypatch.setattr(f"rotationzoo.network.limits.{name}", seconds)
    with black_hole() as endpoint:
        pointed(endpoint)
        started = time.monotonic()
        text = refused(zoo.run(*words))
        assert time.monotonic() - started < 4
    assert f"Waiting for {endpoint.removeprefix('http://')}" in text
    assert "did not answer within 0.4 s" in text or "cannot be reached" in text


def test_offline_no_hub_is_asked(zoo, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for place in ("huggingface", "modelscope"):
        text = refused(zoo.run("list", "--from", place))
        assert "HF_HUB_OFFLINE is set" in text
        assert "--index bundled" in text
    assert not zoo.hf.requests + zoo.ms.requests


def test_the_plan_says_what_it_knows(zoo, model):
    """Two models of three cannot be checked."""
    other = (zoo.folder / "configs" / "model.yaml").read_text()
    for name in ("gone", "broken"):
        (zoo.folder / "configs" / f"{name}.yaml").write_text(
            other.replace(model, f"someone/{name}")
        )
    zoo.hf.create("someone/broken")
    zoo.hf.faults.append(Fault("GET", "someone/broken", 503, 99))
    done = zoo.run("regenerate", "--plan", "--repo", ZOO, "--json")
    assert done.returncode == 3
    plan = json.loads(done.stdout)
    assert [due["model"] for due in plan["models"]] == [model]
    assert plan["unknown"] == {
        "someone/broken": "someone/broken on Hugging Face answered 503",
        "someone/gone": "there is no someone/gone on Hugging Face",
    }
    assert "Note: someone/broken was skipped: someone/broken on Hugging Face answered 503" in (
        done.stderr
    )
    assert "Error: 2 models could not be checked" in done.stderr


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("place", ["huggingface", "modelscope"])
@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("body", quick_first([TYPES, b""]), ids=["types", "nothing"])
def test_a_hub_that_loses_its_mind_while_it_is_written_to(
    zoo, made, monkeypatch, place, after, body
):
    """Only the first answers are valid."""
    hub = zoo.hf if place == "huggingface" else zoo.ms
    hub.create(ZOO)
    honest, calls = hub.answer, []

    def answer_or_not(call):
        calls.append(call)
        return honest(call) if len(calls) <= after else Answer(200, body)

    monkeypatch.setattr(hub, "answer", answer_or_not)
    done = zoo.run("push", made, ZOO, "--to", place, "--create-pr")
    if done.returncode:
        refused(done)
    assert calls
