"""Signed indexes that are served in the wrong place or too late: on another hub, or older ones."""

import datetime
import json

import pytest
from support.published import ZOO, nothing_left, ok, refused

from rotationzoo.zoo import index, signed_index
from rotationzoo.zoo.index import Statement

SIGNATURE = "zoo_index.json.sig"
STAGING = "someone/staging"


@pytest.fixture
def words(keys) -> list:
    """The words that accept one key alone, for what is signed in full."""
    return ["--signer", keys.public, "--require-signature"]


@pytest.fixture
def push(made, keys) -> list:
    """The words that publish and sign with one's own key."""
    return ["push", made, ZOO, "--sign", keys.ours, "--json"]


@pytest.fixture
def later(monkeypatch):
    """Moves the day that the program sees."""

    def move(days: int) -> None:
        day = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=days)
        monkeypatch.setattr(signed_index, "_today", lambda: day)

    return move


def statement_of(zoo, repo: str = ZOO) -> Statement | None:
    return index.parse(zoo.hf.files(repo)[index.NAME], "it").statement


def serve(hub, files: dict[str, bytes], repo: str = ZOO) -> None:
    """Replace the files of a repository, as whoever controls it can."""
    if repo not in hub.repositories:
        hub.create(repo)
    hub.commit(repo, files, delete=sorted(hub.files(repo).keys() - files.keys()))


def sign_as_before(zoo, key, content: dict) -> None:
    """An index as an earlier version signed it, with a valid signature."""
    from rotationzoo.zoo.signing import SigningTool

    data = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    signature, _ = SigningTool(key).sign({index.NAME: data}, "index")
    zoo.hf.commit(ZOO, {index.NAME: data, SIGNATURE: signature})


@pytest.mark.hostile("hub")
def test_a_zoo_of_the_same_signer_does_not_pass_for_another(zoo, made, keys, words):
    """What was signed for `staging` on one hub, in full, is served as the zoo, or on another."""
    ok(zoo.run("push", made, STAGING, "--sign", keys.ours, "--json"))
    for hub, name in ((zoo.hf, "Hugging Face"), (zoo.ms, "ModelScope")):
        serve(hub, zoo.hf.files(STAGING), ZOO)
        where = ["--from", name.replace(" ", "").lower()]
        for asked in (words, words[:2], []):
            text = refused(zoo.run("pull", "demo", "--repo", ZOO, *where, *asked))
            said = f"the index of {ZOO} on {name} was signed for {STAGING} on Hugging Face"
            assert said in text
    assert nothing_left(zoo)
    ok(zoo.run("pull", "demo", "--repo", STAGING, *words, "--json"))


@pytest.mark.hostile("hub")
def test_an_older_state_is_refused_and_not_signed_by_whoever_has_seen_a_newer_one(zoo, push, words):
    """Signed again, it would become the newest, with all that has been withdrawn since."""
    ok(zoo.run(*push))
    older = zoo.hf.files(ZOO)
    ok(zoo.run(*push, "--no-statistics"))
    newer = zoo.hf.files(ZOO)
    ok(zoo.run("pull", "demo", "--repo", ZOO, *words, "--json"))
    for asked in (words, words[:2]):
        zoo.forget()
        serve(zoo.hf, older)
        text = refused(zoo.run("pull", "demo", "--repo", ZOO, *asked))
        assert f"the index of {ZOO} is an older one: its counter is " in text
        assert f"remove its line from {zoo.state / 'indexes.json'}" in text
        assert nothing_left(zoo)
        serve(zoo.hf, newer)
        ok(zoo.run("pull", "demo", "--repo", ZOO, *asked, "--json"))
    ok(zoo.run(*push, "--no-statistics"))  # reads what it published
    serve(zoo.hf, older)
    text = refused(zoo.run(*push))
    assert "is an older one" in text
    assert "a new signature would vouch for all of its entries" in text
    assert zoo.hf.files(ZOO) == older
    ok(zoo.run(*push, "--adopt-index"))


@pytest.mark.hostile("hub")
def test_whoever_names_no_signer_can_be_given_no_counter_to_remember(zoo, made, keys, words):
    """Somebody else's signature, with the highest counter, does not lock the repository."""
    ok(zoo.run("push", made, ZOO, "--sign", keys.other, "--json"))
    ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))
    refused(zoo.run("pull", "demo", "--repo", ZOO, *words))
    assert not (zoo.state / "indexes.json").exists()


@pytest.mark.hostile("hub")
def test_a_signature_ends_and_is_not_renewed_unseen(zoo, push, words, later):
    """Somebody who has never read the zoo cannot be given an old state forever, and a job that
    remembers nothing does not sign it as the newest."""
    ok(zoo.run(*push))
    last = statement_of(zoo).expires
    later(180)
    ok(zoo.run("pull", "demo", "--repo", ZOO, *words, "--json"))
    later(181)
    text = refused(zoo.run("pull", "demo", "--repo", ZOO, *words))
    assert f"the signature of the index of {ZOO} expired on {last}" in text
    assert "push with --sign and --adopt-index" in text
    unrequired = zoo.run("pull", "demo", "--repo", ZOO, *words[:2], "--json")
    assert f"expired on {last}" in unrequired.stderr
    ok(unrequired)
    text = refused(zoo.run(*push))
    assert "expired on" in text
    assert "--adopt-index" in text
    ok(zoo.run(*push, "--adopt-index"))
    ok(zoo.run("pull", "demo", "--repo", ZOO, *words, "--json"))


def test_each_push_counts_up_and_says_when_it_ends(zoo, push, keys):
    """Also after a statement that was made by a clock in the future."""
    ok(zoo.run(*push))
    first = statement_of(zoo)
    day = datetime.datetime.now(datetime.UTC).date() + signed_index.LIFETIME
    assert (first.hub, first.repo) == ("huggingface", ZOO)
    assert abs(datetime.date.fromisoformat(first.expires) - day).days <= 1, "midnight may pass"
    ok(zoo.run(*push, "--no-statistics"))
    assert statement_of(zoo).counter > first.counter
    content = json.loads(zoo.hf.files(ZOO)[index.NAME])
    content["statement"]["counter"] = 2**52
    sign_as_before(zoo, keys.ours, content)
    ok(zoo.run(*push))
    assert statement_of(zoo).counter == 2**52 + 1


@pytest.mark.hostile("hub")
def test_a_statement_that_nobody_signed_does_not_use_up_the_counters(zoo, made, push, words):
    ok(zoo.run("push", made, ZOO, "--json"))
    content = json.loads(zoo.hf.files(ZOO)[index.NAME])
    planted = {"hub": "huggingface", "repo": ZOO, "counter": 2**53 - 1, "expires": "9999-12-31"}
    data = json.dumps({**content, "statement": planted}).encode()
    zoo.hf.commit(ZOO, {index.NAME: data})
    ok(zoo.run(*push, "--adopt-index"))
    ok(zoo.run("pull", "demo", "--repo", ZOO, *words, "--json"))
    assert statement_of(zoo).counter < 2**52
    assert statement_of(zoo).expires < "9999"


@pytest.mark.hostile("hub")
def test_an_index_signed_without_a_statement_is_refused_in_a_sentence(zoo, made, keys, push, words):
    ok(zoo.run("push", made, ZOO, "--json"))
    sign_as_before(zoo, keys.ours, json.loads(zoo.hf.files(ZOO)[index.NAME]))
    text = refused(zoo.run("pull", "demo", "--repo", ZOO, *words))
    assert f"the signature of the index of {ZOO} does not say which repository it is for" in text
    assert "does not say which repository" in refused(zoo.run(*push))
    ok(zoo.run(*push, "--adopt-index"))
    ok(zoo.run("pull", "demo", "--repo", ZOO, *words, "--json"))


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hub", "elsewhere"),
        ("repo", "no repository"),
        ("counter", "7"),
        ("counter", 2**53),
        ("expires", "2027-02-31"),
        ("expires", 20270231),
        ("also", "for every other repository"),
    ],
)
def test_a_statement_of_wrong_types_is_damaged(zoo, signed, keys, words, name, value):
    content = json.loads(zoo.hf.files(ZOO)[index.NAME])
    content["statement"][name] = value
    sign_as_before(zoo, keys.ours, content)
    said = refused(zoo.run("pull", "demo", "--repo", ZOO, *words))
    assert f"is damaged: statement.{name}" in said


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("text", ["", "[]", '{"huggingface/someone/zoo": "1"}', '{"a": 1.5}'])
def test_what_was_seen_is_not_forgotten_because_its_file_is_damaged(zoo, signed, words, text):
    zoo.state.mkdir(parents=True)
    (zoo.state / "indexes.json").write_text(text)
    said = refused(zoo.run("pull", "demo", "--repo", ZOO, *words))
    assert "indexes.json is damaged" in said
    assert f"rm {zoo.state / 'indexes.json'}" in said
    (zoo.state / "indexes.json").unlink()
    ok(zoo.run("pull", "demo", "--repo", ZOO, *words, "--json"))


@pytest.mark.hostile("link")
def test_what_was_seen_is_not_written_through_a_link(zoo, signed, words, tmp_path):
    target = tmp_path / "target"
    target.write_text("{}")
    zoo.state.mkdir(parents=True)
    (zoo.state / "indexes.json").symlink_to(target)
    refused(zoo.run("pull", "demo", "--repo", ZOO, *words))
    assert target.read_text() == "{}"


def test_a_state_that_cannot_be_written_has_a_way_out(zoo, signed, words, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert "XDG_STATE_HOME" in refused(zoo.run("pull", "demo", "--repo", ZOO, *words))

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(signed_index.folders, "state_folder", fail)
    text = refused(zoo.run("pull", "demo", "--repo", ZOO, *words))
    assert "this user has no home" in text
    assert "XDG_STATE_HOME" in text
