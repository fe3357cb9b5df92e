"""Faults of both hubs: temporary ones are retried, and lasting ones are reported. Also commands
that are killed, or that fill the disk."""

import re
import signal
from pathlib import Path

import pytest
from support.cases import quick_first
from support.command_line import stop_once, succeeded
from support.hubs.hub import Fault
from support.published import ZOO, hub_environment, nothing_left, ok, refused

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify


@pytest.mark.parametrize(("what", "count"), [(503, 2), (429, 1), ("drop", 1), ("cut", 1)])
def test_pull_gets_over_what_passes(zoo, made, what, count):
    ok(zoo.run("push", made, ZOO, "--json"))
    zoo.hf.faults.append(Fault("GET", "/storage/", what, count))
    pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", "huggingface", "--json"))
    assert verify(Artifact.open(Path(pulled["path"]))).ok
    assert all(f.count <= 0 for f in zoo.hf.faults), "the fault was met"


ORDERS = ("pull", "huggingface"), ("push", "huggingface"), ("pull", "modelscope")


@pytest.mark.parametrize(("command", "place"), quick_first([*ORDERS, ("push", "modelscope")]))
def test_a_503_on_each_request_in_turn(zoo, made, place, command):
    """Each request of a command fails once, in turn, and the command still succeeds."""
    hub = zoo.hf if place == "huggingface" else zoo.ms
    number = 0

    def run() -> None:
        nonlocal number
        number += 1
        if command == "push":  # to a new repository each time, so that something is sent
            ok(zoo.run("push", made, f"{ZOO}-{number}", "--to", place, "--json"))
            return
        zoo.forget()
        pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", place, "--json"))
        assert verify(Artifact.open(Path(pulled["path"]))).ok

    ok(zoo.run("push", made, ZOO, "--to", place, "--json"))
    before = len(hub.requests)
    run()
    seen = {}
    for line in hub.requests[before:]:
        method, path = line.split(" ")
        kind = re.sub(r"[0-9a-f]{12,}", "[0-9a-f]+", re.escape(path.split("?")[0]))
        seen[method, kind.replace(r"\-1", ".*")] = None
    assert len(seen) >= 3
    for method, pattern in seen:
        fault = Fault(method, pattern, 503, 1)
        hub.faults[:] = [fault]
        run()
        assert fault.count == 0, f"{method} {pattern} was not met"


LASTING = [
    ("huggingface", "/storage/", 503, "answered 503"),
    ("huggingface", "/resolve/.*manifest", 401, "refused access"),
    ("huggingface", "/resolve/.*manifest", 404, "Hugging Face"),
    ("huggingface", "/storage/", "cut", "closed the connection early"),
    ("huggingface", "/storage/", "flip", "sha256 differs"),
    ("modelscope", "/storage/", "flip", "sha256 differs"),
]


@pytest.mark.parametrize(("place", "pattern", "fault", "words"), LASTING)
def test_pull_says_what_lasts_and_leaves_nothing(zoo, made, tmp_path, place, pattern, fault, words):
    hub, listed = zoo.hf if place == "huggingface" else zoo.ms, tmp_path / "zoo_index.json"
    ok(zoo.run("push", made, ZOO, "--to", place, "--index", listed, "--json"))
    hub.faults += [Fault("GET", pattern, fault, 99), Fault("HEAD", pattern, fault, 99)]
    assert words in refused(zoo.run("pull", "demo", "--index", listed))
    assert nothing_left(zoo)
    hub.faults.clear()
    ok(zoo.run("pull", "demo", "--index", listed, "--json"))


@pytest.fixture
def environment(command, zoo, tmp_path) -> dict[str, str]:
    """The environment of a process that uses these hubs."""
    return command.environment | hub_environment(zoo.hf, zoo.ms, tmp_path)


@pytest.mark.parametrize(
    "words",
    [("push", "{made}", ZOO), ("pull", "demo", "--repo", ZOO, "--local-dir", "here")],
    ids=["push", "pull"],
)
def test_killed_in_the_middle(zoo, program, environment, made, words):
    if words[0] == "pull":
        succeeded(zoo.run("push", made, ZOO))
    words = [word.format(made=made) for word in words]
    slow = Fault("PUT" if words[0] == "push" else "GET", "/storage/", 503, 99)
    zoo.hf.faults.append(slow)
    start = [*program, *words]
    stop_once(lambda: slow.count < 99, signal.SIGKILL, start, zoo.folder, environment)
    assert slow.count < 99, "it was in the middle"
    assert not (zoo.folder / "here").exists()
    zoo.hf.faults.clear()
    succeeded(zoo.run(*words))
    if words[0] == "pull":
        assert sorted(path.name for path in zoo.folder.iterdir()) == ["here"]
    else:
        assert zoo.hf.commits(ZOO) == 2


def test_a_full_disk(zoo, command, environment, made):
    import resource

    pull = ["pull", "demo", "--repo", ZOO, "--local-dir", "here"]
    succeeded(zoo.run("push", made, ZOO))
    limited = command(
        *pull,
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert limited.returncode == 1, limited.stderr
    assert "Traceback" not in limited.stderr
    assert not (zoo.folder / "here").exists()
    succeeded(zoo.run(*pull))
