"""Faults of every kind on both hubs: what passes is got over, what lasts is said."""

import re
from pathlib import Path

import pytest
from support.cases import quick_first
from support.hubs.hub import Fault
from support.published import ZOO, nothing_left, ok, refused

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
    """Every request that a command makes fails once, one after the other, and each time the command
    succeeds all the same."""
    hub = zoo.hf if place == "huggingface" else zoo.ms
    number = 0

    def run() -> None:
        nonlocal number
        number += 1
        if command == "push":  # a repository of its own each time, so that there is something to do
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
