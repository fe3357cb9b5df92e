"""A folder instead of a hub: its artifacts are pushed, listed, pulled and checked."""

import pytest
from support.command_line import succeeded
from support.published import ok, refused

from rotationzoo import pull
from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.errors import StaleParent
from rotationzoo.zoo.hubs.protocol import Publication, open_hub

FOLDER = "./carried"


@pytest.fixture
def pushed(zoo, made):
    """The output of `push`, and the folder of the artifact."""
    pushed = ok(zoo.run("push", made, FOLDER, "--json"))
    return pushed, zoo.folder / FOLDER / pushed["path"]


def test_what_is_pushed_to_a_folder_is_listed_and_pulled_wherever_it_is_carried(zoo, made, pushed):
    hubs = pushed[0]["hubs"]
    assert [*hubs] == ["disk"]
    assert not ok(zoo.run("push", made, FOLDER, "--json"))["hubs"]["disk"]["changed"]
    (zoo.folder / FOLDER).rename(zoo.folder / "elsewhere")
    moved = str(zoo.folder / "elsewhere")
    shown = succeeded(zoo.run("list", "--repo", moved))
    assert f"pull demo --repo {moved}" in shown.stderr
    words = "pull", "demo", "--repo", moved
    assert verify(Artifact.open(ok(zoo.run(*words, "--json"))["path"]), "demo").ok
    assert pull("demo", repo=moved).identity == Artifact.open(made).identity
    assert not zoo.hf.requests, "no hub"
    assert "./carried has no zoo_index.json" in refused(zoo.run("list", "--repo", FOLDER))


def test_a_changed_file_is_not_pulled(zoo, pushed):
    path = pushed[1] / "manifest.json"
    path.write_text(path.read_text().replace("demo", "odem", 1))
    assert "its sha256 differs" in refused(zoo.run("pull", "demo", "--repo", FOLDER))
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert "symbolic link" in refused(zoo.run("pull", "demo", "--repo", FOLDER))


def test_only_a_zoo_or_a_new_folder_is_written_to(zoo, made):
    folder = zoo.folder / "mine"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    assert "./mine is not a zoo and has a README.md" in refused(zoo.run("push", made, "./mine"))
    assert (folder / "README.md").read_text() == "mine"
    assert "or a folder as: ./zoo" in refused(zoo.run("push", made, "mine"), 2)


def test_another_push_in_between_is_not_overwritten(pushed, zoo):
    files = {"zoo_index.json": b"{}"}
    later = Publication(str(zoo.folder / FOLDER), files, "", "0" * 12, "", create_pr=False)
    with pytest.raises(StaleParent):
        open_hub("disk").publish(later)


def test_the_artifact_is_signed_and_the_index_is_not(zoo, made, keys):
    said = succeeded(zoo.run("push", made, FOLDER, "--sign", keys.ours)).stderr
    assert "the index is not signed" in said
    words = "pull", "demo", "--repo", FOLDER, "--signer", keys.public
    ok(zoo.run(*words, "--json"))
    assert "has no signature" in refused(zoo.run(*words, "--require-signature"))
