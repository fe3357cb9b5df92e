"""Models that neither the hub gives nor its cache has: the error says what was asked, what
answered, and which revisions are in the cache."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from support.cases import quick_first
from support.command_line import only_error
from support.hubs.hub import Answer, Fault
from support.published import point_clients, publish_folder

MODEL = "someone/tiny"
WORDS = ["calibrate", MODEL, "--dry-run"]
NO_HUB = " does not answer as a hub does ("
COMMIT, TAG = {"X-Repo-Commit": "a" * 40}, {"ETag": '"b"'}
ELSEWHERE = Answer(302, headers={"Location": "http://other.example:81/config.json"})


@pytest.fixture
def cached(zoo, tiny) -> Path:
    """The cache of a model at one commit, for a process that asks no hub."""
    publish_folder(zoo.hf, MODEL, tiny)
    assert zoo.run(*WORDS).returncode == 0
    return Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--someone--tiny"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(headers=TAG), NO_HUB),
        (Answer(headers=COMMIT), NO_HUB),
        (Answer(body=b"<html>Sign in"), NO_HUB),
        (ELSEWHERE, NO_HUB),
        (403, f"/{MODEL}/resolve/main/config.json answered 403, and"),
    ],
)
@pytest.mark.hostile("hub")
def test_a_mirror_with_answers_unlike_a_hub(zoo, tiny, answer, says):
    publish_folder(zoo.hf, MODEL, tiny)
    zoo.hf.faults.append(Fault("HEAD", "/resolve/", answer, 99))
    shown = only_error(zoo.run(*WORDS))
    assert zoo.hf.endpoint.removeprefix("http://") in shown.partition(says)[0]
    assert says in shown
    assert "cannot be reached" not in shown
    zoo.hf.faults.clear()
    assert zoo.run(*WORDS).returncode == 0
    zoo.hf.faults.append(Fault("HEAD", "/resolve/", answer, 99))
    assert zoo.run(*WORDS).returncode == 0, "the cache has it"


@pytest.mark.hostile("hub")
def test_a_redirect_to_a_host_that_is_down_is_named(zoo):
    down = Answer(302, headers={"Location": "http://127.0.0.1:9/"})
    zoo.hf.faults.append(Fault("GET", "/api/", down, 99))
    host = zoo.hf.endpoint.removeprefix("http://")
    shown = only_error(zoo.run("list", "--repo", "someone/zoo"))
    assert f"cannot be reached ({host} redirected to 127.0.0.1:9: " in shown


@pytest.mark.parametrize(
    ("named", "revision", "offline"),
    quick_first(
        [
            ("c" * 40, "main", False),
            (None, "main", True),
            ("{head}", "a-part", True),
            ("{head}\n", "main", False),
            ("{head}", "v9", True),
            ("{head}", "d" * 40, False),
        ],
        3,
    ),
)
def test_cached_revisions_are_suggested(zoo, cached, monkeypatch, named, revision, offline):
    """`named` is what the cache's file of the main branch says, if it is there."""
    head, file = zoo.hf.head(MODEL), cached / "refs" / "main"
    if named is None:
        shutil.rmtree(file.parent)
    else:
        file.write_text(named.format(head=head))
    revision = revision.replace("a-part", head[:8])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    point_clients(monkeypatch, "http://127.0.0.1:9")
    shown = only_error(zoo.run(*WORDS, "--revision", revision))
    reason = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached (127.0.0.1:9: "
    assert f"Error: {reason}" in shown
    assert f"the hub's cache here has {MODEL} not at {revision}, but at {head}\n" in shown
    assert f"Hint: add: --revision {head}\n" in shown
    assert zoo.run(*WORDS, "--revision", head).returncode == 0, "the hint helps"


def test_a_snapshot_may_lack_files(zoo, cached, monkeypatch):
    head = zoo.hf.head(MODEL)
    (cached / "snapshots" / head / "config.json").unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    shown = only_error(zoo.run(*WORDS, "--revision", head))
    assert f"not all files of {MODEL} at {head} are in the hub's cache here" in shown
