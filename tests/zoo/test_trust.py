"""Push and pull trust no other repository, no stranger's pull request, and no other model."""

import json
import shutil
from pathlib import Path

import pytest
from support.command_line import edited_manifest
from support.hubs.hub import Fault
from support.published import ZOO, nothing_left, ok, refused

from rotationzoo.artifact.store import Artifact
from rotationzoo.zoo import index


@pytest.fixture
def squatted(zoo, made):
    """A repository with the zoo's name on the other hub, from somebody else."""
    ok(zoo.run("push", made, ZOO, "--to", "modelscope", "--json"))
    zoo.hf.create(ZOO)
    return zoo


FAILURES = [503, 401, "drop"]


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("what", [*FAILURES, 404], ids=str)
def test_a_hub_that_fails_is_not_replaced_by_another(squatted, what):
    squatted.hf.faults.append(Fault("GET", "/api/models/", what, 99))
    text = refused(squatted.run("pull", "demo", "--repo", ZOO))
    assert f"{ZOO} on Hugging Face" in text
    assert "Hint: " in text
    assert not [line for line in squatted.ms.requests if "FilePath" in line]
    assert nothing_left(squatted)


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("what", ["no repository", "no index"])
def test_nor_one_that_has_no_such_zoo(squatted, what):
    if what == "no repository":
        del squatted.hf.repositories[ZOO]
    text = refused(squatted.run("pull", "demo", "--repo", ZOO))
    assert "add: --from modelscope" in text, "which is then somebody's choice"
    assert nothing_left(squatted)
    pulled = ok(squatted.run("pull", "demo", "--repo", ZOO, "--from", "modelscope", "--json"))
    assert pulled["hub"] == "modelscope"


@pytest.fixture
def twice(zoo, made, tmp_path):
    """An index with a copy on each hub."""
    listed = tmp_path / "zoo_index.json"
    ok(zoo.run("push", made, ZOO, "--to", "both", "--index", listed, "--json"))
    zoo.index = listed
    return zoo


def test_a_copy_that_the_index_names_stands_in_for_one_that_does_not_exist(twice):
    del twice.hf.repositories[ZOO]
    pulled = ok(twice.run("pull", "demo", "--index", twice.index, "--json"))
    assert pulled["hub"] == "modelscope"


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("what", FAILURES, ids=str)
def test_a_copy_does_not_stand_in_for_one_that_fails(twice, what):
    twice.hf.faults.append(Fault("GET", "/resolve/", what, 99))
    requests = len(twice.ms.requests)
    assert "on Hugging Face" in refused(twice.run("pull", "demo", "--index", twice.index))
    assert len(twice.ms.requests) == requests


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("what", FAILURES, ids=str)
@pytest.mark.parametrize("plan", [True, False], ids=["plan", "regenerate"])
def test_regenerate_knows_nothing_where_the_zoo_cannot_be_read(zoo, model, what, plan):
    """It does not assume that nothing is published, nor make rotations without a comparison."""
    zoo.hf.create(ZOO)
    zoo.hf.faults += [Fault("GET", f"{ZOO}", what, 99), Fault("HEAD", f"{ZOO}", what, 99)]
    text = refused(zoo.run("regenerate", *(["--plan"] if plan else [model]), "--repo", ZOO))
    assert f"{ZOO} on Hugging Face" in text
    assert not (zoo.folder / "rotations").exists()


def test_the_list_that_came_along_is_read_where_there_is_no_default_zoo(zoo):
    says = "the index that came with rotationzoo (there is no rotationzoo/zoo on Hugging Face)"
    assert says in zoo.run("list").stderr
    zoo.hf.faults.append(Fault("GET", "/api/models/", 503, 99))
    assert "--index bundled" in refused(zoo.run("list"))


def test_a_pull_request_of_ones_own_is_gone_on_with(zoo, made):
    zoo.hf.create(ZOO)
    first = ok(zoo.run("push", made, ZOO, "--create-pr", "--json"))["hubs"]["huggingface"]
    again = ok(zoo.run("push", made, ZOO, "--create-pr", "--json"))["hubs"]["huggingface"]
    assert again["revision"] == first["revision"]
    assert again["url"].endswith("/discussions/1")
    assert len(zoo.hf.repositories[ZOO].pulls) == 1


OTHERS = {
    "of a stranger": dict(author="stranger", files={"demo/README.md": b"theirs"}),
    "of a stranger with the same files": dict(author="stranger", files={}),
    "with other files": dict(author="tester", files={"payload.bin": b"theirs"}),
    "on an earlier commit": dict(author="tester", files={}, old=True),
}


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("lists_all", [False, True], ids=["honest", "a hub that lists everybody's"])
@pytest.mark.parametrize("other", OTHERS)
def test_any_other_pull_request_is_left_alone(zoo, made, other, lists_all):
    zoo.hf.create(ZOO)
    zoo.hf.ignores_author = lists_all
    given = dict(OTHERS[other])
    base = zoo.hf.head(ZOO) if given.pop("old", False) else None
    if base:
        zoo.hf.commit(ZOO, {"since.txt": b"x"})
    title = f"Add demo, oscar-{Artifact.open(made).identity[:12]}"
    ref = zoo.hf.propose(ZOO, title, base=base, **given)
    before = zoo.hf.repositories[ZOO].refs[ref]
    sent = ok(zoo.run("push", made, ZOO, "--create-pr", "--json"))["hubs"]["huggingface"]
    assert zoo.hf.repositories[ZOO].refs[ref] == before, "nothing was added to it"
    assert sent["url"].endswith("/discussions/2")
    assert "payload.bin" not in zoo.hf.files(ZOO, sent["revision"])


@pytest.mark.hostile("hub")
def test_a_commit_of_a_stranger_on_ones_own_pull_request_is_not_built_on(zoo, made):
    zoo.hf.create(ZOO)
    ok(zoo.run("push", made, ZOO, "--create-pr", "--json"))
    added = zoo.hf.commit(ZOO, {"zoo_index.json": b"theirs"}, branch="refs/pr/1")
    zoo.hf.repositories[ZOO].commits[added].author = "stranger"
    sent = ok(zoo.run("push", made, ZOO, "--create-pr", "--json"))["hubs"]["huggingface"]
    assert sent["url"].endswith("/discussions/2")


def renamed(made: Path, folder: Path, **changes) -> Path:
    """A copy of an artifact with changes of the model in its manifest."""
    copy = shutil.copytree(made, folder)
    with edited_manifest(copy) as manifest:
        manifest["model"] |= changes
    return copy


@pytest.mark.hostile("values")
@pytest.mark.parametrize("revision", ["head", "f" * 40])
def test_rotations_of_the_demo_are_not_published_as_another_models(
    zoo, made, tiny, tmp_path, revision
):
    zoo.hf.create("Qwen/Qwen3-8B")
    head = zoo.hf.commit("Qwen/Qwen3-8B", {"config.json": (tiny / "config.json").read_bytes()})
    revision = head if revision == "head" else revision
    wrong = renamed(made, tmp_path / "wrong", id="Qwen/Qwen3-8B", revision=revision)
    text = refused(zoo.run("push", wrong, ZOO))
    assert "is not published: " in text
    assert "Qwen/Qwen3-8B" in text
    assert ZOO not in zoo.hf.repositories


@pytest.mark.hostile("values")
@pytest.mark.parametrize("name", ["demo", "./models/demo", "/home/somebody/Demo"])
def test_no_other_model_is_published_as_the_demo(zoo, made, tmp_path, name):
    wrong = renamed(made, tmp_path / "wrong", id=name, config_sha256="0" * 64)
    assert "listed as the model that comes with rotationzoo" in refused(zoo.run("push", wrong, ZOO))


def test_a_local_model_is_listed_under_its_own_name_which_has_no_owner(zoo, made, tmp_path):
    for path, name in {"/home/me/Qwen/Qwen3-8B": "Qwen3-8B", "me@home": "me-home"}.items():
        repo = f"someone/{name}"
        copy = renamed(made, tmp_path / name, id=path)
        sent = ok(zoo.run("push", copy, repo, "--json"))
        data = zoo.hf.files(repo)["zoo_index.json"]
        assert [entry.model for entry in index.parse(data, "it").entries] == [name]
        assert b"/home/me" not in data
        assert sent["path"].startswith(f"{name}/")


@pytest.mark.hostile("values")
def test_two_local_models_do_not_share_a_name_in_a_zoo(zoo, made, tmp_path):
    ok(zoo.run("push", renamed(made, tmp_path / "mine", id="/a/my-model"), ZOO, "--json"))
    theirs = renamed(made, tmp_path / "theirs", id="/b/My-Model", config_sha256="1" * 64)
    assert "already lists another model as my-model" in refused(zoo.run("push", theirs, ZOO))


LISTED = {
    "model": "Qwen/Qwen3-8B",
    "model_revision": "f" * 40,
    "config_sha256": "0" * 64,
    "weights_fingerprint": "0" * 64,
    "recipe": "best",
    "recipe_sha256": "0" * 64,
    "geometry": [{"index": 0}],
    "rope_scaling": "yarn:4",
}


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("here", [False, True], ids=["fetched", "here already"])
def test_an_entry_that_says_another_model_than_the_manifest_is_refused(zoo, listed, here):
    if here:
        ok(zoo.run("pull", "demo", "--index", listed, "--json"))
    whole = listed.read_text()
    for key, lie in LISTED.items():
        content = json.loads(whole)
        content["entries"][0][key] = lie
        listed.write_text(json.dumps(content))
        text = refused(zoo.run("pull", content["entries"][0]["model"], "--index", listed))
        assert "is listed for" in text, key
        assert here or nothing_left(zoo), key
