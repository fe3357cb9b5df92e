"""Publishing: places, refusals, and commits of others in between."""

import shutil
from pathlib import Path

import pytest
from support.hubs.hub import Fault
from support.published import ZOO, ok, refused
from support.reports import summary

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.writer import add_files
from rotationzoo.zoo import index
from rotationzoo.zoo.hubs.huggingface import HuggingFace
from rotationzoo.zoo.push import prepare_upload


def test_publish_list_and_pull_on_both_hubs(zoo, made):
    sent = ok(zoo.run("push", made, ZOO, "--to", "both", "--json"))
    assert sent["hubs"]["huggingface"]["changed"]
    assert sent["hubs"]["modelscope"]["changed"]
    commits = zoo.hf.commits(ZOO), zoo.ms.commits(ZOO)
    again = ok(zoo.run("push", made, ZOO, "--to", "both", "--json"))
    assert (zoo.hf.commits(ZOO), zoo.ms.commits(ZOO)) == commits, "nothing has changed"
    assert again["hubs"]["huggingface"] == {**sent["hubs"]["huggingface"], "changed": False}
    assert not again["hubs"]["modelscope"]["changed"]

    shown = ok(zoo.run("list", "--repo", ZOO, "--json"))
    (entry,) = shown["entries"]
    assert (entry["model"], entry["recipe"]) == ("demo", "oscar")
    assert ok(zoo.run("list", "--repo", ZOO, "qwen", "--json")) == {"entries": []}

    for place, hub in (("huggingface", zoo.hf), ("modelscope", zoo.ms)):
        zoo.forget()
        pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", place, "--json"))
        artifact = Artifact.open(Path(pulled["path"]))
        assert verify(artifact, "demo").ok
        assert pulled["revision"] == sent["hubs"][place]["revision"]
        names = {path.name for path in made.iterdir()}
        assert {path.name for path in artifact.folder.iterdir()} == names
        for name in names - {"README.md"}:  # which says from where to pull
            assert (artifact.folder / name).read_bytes() == (made / name).read_bytes()
        before = len(hub.requests)
        again = ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", place, "--json"))
        assert again["path"] == pulled["path"]
        assert "safetensors" not in " ".join(hub.requests[before:]), "no second download"
    content = zoo.hf.files(ZOO)
    assert {"zoo_index.json", "README.md", "config.json"} <= content.keys()
    assert b"rotationzoo pull demo --repo someone/zoo" in content["README.md"]


@pytest.mark.parametrize("action", ["refuse", "nothing", "serve", "ask"])
def test_what_is_of_no_use_by_its_own_evaluation_needs_anyway(zoo, made, tmp_path, action):
    folder = Path(shutil.copytree(made, tmp_path / "mine"))
    artifact = Artifact.open(folder)
    evaluation = summary({"mine": 14, "hadamard": 14}, artifact.identity, {"needles": 16})
    words = ["mine keeps all.", "It is within 3 points.", "Use Hadamard."]
    decision = {"arm": "mine", "action": action, "level": 0.05, "words": words}
    evaluation["verdict"]["decisions"] = [decision]
    add_files(artifact, {}, {"evaluation": evaluation})
    push = ["push", folder, ZOO, "--dry-run"]
    if action in ("serve", "ask"):
        ok(zoo.run(*push, "--json"))
        return
    says = refused(zoo.run(*push))
    assert "is not worth publishing by its own evaluation: mine keeps all\n" in says
    assert says.rstrip().endswith(f"rotationzoo push {folder} {ZOO} --dry-run --anyway")
    ok(zoo.run(*push, "--anyway", "--json"))


def test_a_dry_run_reaches_no_hub(zoo, made):
    files = ok(zoo.run("push", made, ZOO, "--dry-run", "--json"))["files"]
    assert {Path(file["path"]).name for file in files} == {path.name for path in made.iterdir()}
    assert not zoo.hf.requests
    assert not any(Path(file["path"]).name == "model.sig" for file in files)
    without = ok(zoo.run("push", made, ZOO, "--dry-run", "--no-statistics", "--json"))["files"]
    assert len(without) == len(files) - 1


def test_another_commit_in_between_is_extended(zoo, made, monkeypatch):
    zoo.hf.create(ZOO)
    ok(zoo.run("push", made, "someone/other", "--json"))
    theirs = zoo.hf.files("someone/other")["zoo_index.json"].replace(b'"demo"', b'"other"')
    publish = HuggingFace.publish
    calls = []

    def late(self, repo, *arguments, **options):
        if not calls:
            zoo.hf.commit(ZOO, {"zoo_index.json": theirs})
        calls.append(repo)
        return publish(self, repo, *arguments, **options)

    monkeypatch.setattr(HuggingFace, "publish", late)
    ok(zoo.run("push", made, ZOO, "--json"))
    assert len(calls) == 2, "the stale parent was refused"
    entries = index.parse(zoo.hf.files(ZOO)["zoo_index.json"], "zoo").entries
    assert [entry.model for entry in entries] == ["demo", "other"]


def test_a_pull_request_can_be_pulled_before_it_is_merged(zoo, made, tmp_path):
    zoo.hf.create(ZOO)
    listed = tmp_path / "zoo_index.json"
    sent = ok(zoo.run("push", made, ZOO, "--create-pr", "--index", listed, "--json"))
    assert "/discussions/1" in sent["hubs"]["huggingface"]["url"]
    assert "zoo_index.json" not in zoo.hf.files(ZOO), "not on the main branch yet"
    pulled = ok(zoo.run("pull", "demo", "--index", listed, "--json"))
    assert verify(Artifact.open(Path(pulled["path"])), "demo").ok


def test_one_hub_takes_it_and_the_other_does_not(zoo, made):
    zoo.ms.faults.append(Fault("POST", "/commit/", 403, 99))
    text = refused(zoo.run("push", made, ZOO, "--to", "both", "--sign", "none"), code=3)
    assert "huggingface accepted it and modelscope did not" in text
    assert f"rotationzoo push {made} --sign none {ZOO} --to modelscope\n" in text
    zoo.ms.faults.clear()
    ok(zoo.run("push", made, ZOO, "--to", "modelscope", "--json"))
    assert zoo.hf.commits(ZOO) == 2


@pytest.mark.parametrize("what", ["drop", "lost"])
def test_push_gets_over_a_commit_that_fails_once(zoo, made, what):
    """Even if only the answer to the commit was lost."""
    zoo.hf.create(ZOO)
    zoo.hf.faults.append(Fault("POST", "/commit/", what, 1))
    sent = ok(zoo.run("push", made, ZOO, "--json"))["hubs"]["huggingface"]
    assert sent["revision"] == zoo.hf.head(ZOO)
    assert zoo.hf.commits(ZOO) == 2


def test_an_index_has_the_figures_of_the_artifact_and_not_of_a_baseline(zoo, made, tmp_path):
    """Even after reading, which sorts the arms of its evaluation by name."""
    artifact = Artifact.open(shutil.copytree(made, tmp_path / "made"))
    evaluation = summary({"made": 14, "hadamard": 1}, artifact.identity, {"needles": 16})
    add_files(artifact, {"evaluation.json": b"{}"}, {"evaluation": evaluation})
    ok(zoo.run("push", artifact.folder, ZOO, "--json"))
    (listed,) = ok(zoo.run("list", "--repo", ZOO, "--json"))["entries"]
    assert list(listed["evaluation"]["arms"]) == ["hadamard", "made"]
    bits = listed["summary"].pop("bits_per_element")
    # From `plan`: 388.0625 bytes for each token of 1,024 elements.
    assert bits == pytest.approx(388.0625 * 8 / 1024, abs=1e-4)
    assert listed["summary"] == {"perplexity_increase": 0.5}


def test_the_page_and_the_picture_are_drawn_again_from_what_is_saved(zoo, made, tmp_path):
    artifact = Artifact.open(shutil.copytree(made, tmp_path / "made"))
    artifact = add_files(artifact, {"report.html": b"old", "answers.png": b"old"}, {})
    path = ok(zoo.run("push", artifact.folder, ZOO, "--json"))["path"]
    files = zoo.hf.files(ZOO)
    assert b"Measure them first." in files[f"{path}/report.html"]
    assert f"{path}/answers.png" not in files, "there is nothing to draw"
    assert b"answers.png" not in files[f"{path}/README.md"]
    pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))
    assert verify(Artifact.open(pulled["path"])).ok


def test_a_signed_page_is_published_as_it_was_signed(zoo, made, keys, tmp_path):
    artifact = Artifact.open(shutil.copytree(made, tmp_path / "made"))
    add_files(artifact, {"report.html": b"old"}, {})
    ok(zoo.run("push", artifact.folder, ZOO, "--sign", keys.ours, "--json"))
    pulled = Artifact.open(ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))["path"])
    upload = prepare_upload(pulled, "other/zoo")
    assert upload.files["report.html"] == pulled.folder / "report.html"
    assert upload.is_signed
