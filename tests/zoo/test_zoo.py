"""The zoo over loopback hubs: publish, list, pull, faults of every kind, and new rotations for a
new revision."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from support.hubs import Fault, huggingface, modelscope
from support.places import ROOT
from support.published import ZOO, ms_environment, nothing_left, ok, refused
from support.zoo_models import CONFIG, EVALUATED, change_weights, foreign, planned, save_foreign

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.zoo import hubs as clients
from rotationzoo.zoo import index, lookup

# ---- the journey


def test_publish_list_and_pull_on_both_hubs(zoo, made):
    sent = ok(zoo.run("push", made, ZOO, "--to", "both", "--json"))
    assert sent["hubs"]["huggingface"]["changed"]
    assert sent["hubs"]["modelscope"]["changed"]
    commits = zoo.hf.commits(ZOO), zoo.ms.commits(ZOO)
    again = ok(zoo.run("push", made, ZOO, "--to", "both", "--json"))
    assert (zoo.hf.commits(ZOO), zoo.ms.commits(ZOO)) == commits, (
        "unchanged content is no new commit"
    )
    assert again["hubs"]["huggingface"] == {**sent["hubs"]["huggingface"], "changed": False}
    assert not again["hubs"]["modelscope"]["changed"]

    shown = ok(zoo.run("list", "--repo", ZOO, "--remote", "--json"))
    assert [(entry["model"], entry["recipe"], entry["there"]) for entry in shown["entries"]] == [
        ("demo", "oscar", True)
    ]
    assert ok(zoo.run("list", "--repo", ZOO, "qwen", "--json")) == {"entries": []}

    for place, hub in (("huggingface", zoo.hf), ("modelscope", zoo.ms)):
        zoo.forget()
        pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", place, "--json"))
        artifact = Artifact.open(Path(pulled["path"]))
        assert verify(artifact, "demo").ok
        assert pulled["revision"] == sent["hubs"][place]["revision"]
        names = {path.name for path in made.iterdir()}
        assert {path.name for path in artifact.folder.iterdir()} == names
        assert all(
            (artifact.folder / name).read_bytes() == (made / name).read_bytes() for name in names
        )
        before = len(hub.requests)
        again = ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", place, "--json"))
        assert again["path"] == pulled["path"]
        assert not [request for request in hub.requests[before:] if "safetensors" in request], (
            "no second download"
        )
    content = zoo.hf.files(ZOO)
    assert {"zoo_index.json", "README.md", "config.json"} <= content.keys()
    assert b"rotationzoo pull demo --repo someone/zoo" in content["README.md"]


def test_a_dry_run_reaches_no_hub(zoo, made):
    files = ok(zoo.run("push", made, ZOO, "--dry-run", "--json"))["files"]
    assert {Path(file["path"]).name for file in files} == {path.name for path in made.iterdir()}
    assert not zoo.hf.requests
    without = ok(zoo.run("push", made, ZOO, "--dry-run", "--no-statistics", "--json"))["files"]
    assert len(without) == len(files) - 1


def test_without_statistics_it_is_still_sound(zoo, made):
    ok(zoo.run("push", made, ZOO, "--no-statistics", "--json"))
    pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))
    assert "statistics.safetensors" not in pulled["files"]
    assert verify(Artifact.open(Path(pulled["path"])), "demo").ok


def test_a_repository_needs_an_owner_and_a_name(zoo, made):
    for repo in ("zoo", "a/b/c", "../b"):
        assert f"{repo} is no repository" in refused(
            zoo.run("push", made, repo, "--dry-run"), code=2
        )


def test_a_damaged_artifact_is_not_published(zoo, made, tmp_path):
    broken = shutil.copytree(made, tmp_path / "broken")
    (broken / "statistics.safetensors").write_bytes(b"x" * 100)
    assert "is not published: statistics.safetensors" in refused(zoo.run("push", broken, ZOO))
    assert not zoo.hf.requests


def test_a_pinned_pull_is_not_moved_by_a_later_commit(zoo, made, tmp_path):
    listed = tmp_path / "zoo_index.json"
    first = ok(zoo.run("push", made, ZOO, "--index", listed, "--json"))
    path = first["path"]
    zoo.hf.commit(ZOO, {f"{path}/README.md": b"changed later"})
    pulled = ok(zoo.run("pull", "demo", "--index", listed, "--json"))
    assert pulled["revision"] == first["hubs"]["huggingface"]["revision"] != zoo.hf.head(ZOO)
    assert (Path(pulled["path"]) / "README.md").read_bytes() == (made / "README.md").read_bytes()
    assert index.read(listed).entries[0].copies[0].revision == pulled["revision"]
    requests = len(zoo.hf.requests)
    with pytest.MonkeyPatch.context() as offline:
        offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert ok(zoo.run("pull", "demo", "--index", listed, "--json"))["path"] == pulled["path"]
    assert len(zoo.hf.requests) == requests, "offline by pinned revision"


def test_another_commit_in_between_is_extended(zoo, made, monkeypatch):
    """The index that somebody else has just committed is kept, and ours is added to it."""
    zoo.hf.create(ZOO)
    other = Path(made)
    ok(zoo.run("push", other, "someone/other", "--json"))
    theirs = zoo.hf.files("someone/other")["zoo_index.json"].replace(b'"demo"', b'"other"')
    publish = clients.HuggingFace.publish
    calls = []

    def late(self, repo, *arguments, **options):
        if not calls:
            zoo.hf.commit(ZOO, {"zoo_index.json": theirs})
        calls.append(repo)
        return publish(self, repo, *arguments, **options)

    monkeypatch.setattr(clients.HuggingFace, "publish", late)
    ok(zoo.run("push", made, ZOO, "--json"))
    assert len(calls) == 2, "the stale parent was refused"
    models = [
        entry.model for entry in index.parse(zoo.hf.files(ZOO)["zoo_index.json"], "zoo").entries
    ]
    assert models == ["demo", "other"]


def test_a_pull_request_can_be_pulled_before_it_is_merged(zoo, made, tmp_path):
    zoo.hf.create(ZOO)
    listed = tmp_path / "zoo_index.json"
    sent = ok(zoo.run("push", made, ZOO, "--create-pr", "--index", listed, "--json"))["hubs"][
        "huggingface"
    ]
    assert "/discussions/1" in sent["url"]
    assert "zoo_index.json" not in zoo.hf.files(ZOO), "not on the main branch yet"
    pulled = ok(zoo.run("pull", "demo", "--index", listed, "--json"))
    assert verify(Artifact.open(Path(pulled["path"])), "demo").ok


def test_one_hub_takes_it_and_the_other_does_not(zoo, made):
    zoo.ms.faults.append(Fault("POST", "/commit/", 403, 99))
    text = refused(zoo.run("push", made, ZOO, "--to", "both"), code=3)
    assert "huggingface took it and modelscope did not" in text
    assert f"rotationzoo push {made} {ZOO} --to modelscope" in text
    zoo.ms.faults.clear()
    ok(zoo.run("push", made, ZOO, "--to", "modelscope", "--json"))
    assert zoo.hf.commits(ZOO) == 2


# ---- faults


PASSING = [
    ("503 on a file", "GET", "/resolve/.*manifest", 503, 2),
    ("503 on the storage", "GET", "/storage/", 503, 2),
    ("503 on the repository", "GET", "/api/models/", 503, 2),
    ("429", "GET", "/storage/", 429, 1),
    ("a dropped connection", "GET", "/storage/", "drop", 1),
    ("a cut body", "GET", "/storage/", "cut", 1),
]


@pytest.mark.parametrize(
    ("what", "method", "pattern", "fault", "count"), PASSING, ids=[row[0] for row in PASSING]
)
def test_pull_gets_over_what_passes(zoo, made, what, method, pattern, fault, count):
    ok(zoo.run("push", made, ZOO, "--json"))
    zoo.hf.faults.append(Fault(method, pattern, fault, count))
    pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", "huggingface", "--json"))
    assert verify(Artifact.open(Path(pulled["path"]))).ok
    assert all(f.count <= 0 for f in zoo.hf.faults), "the fault was met"


@pytest.mark.parametrize("place", ["huggingface", "modelscope"])
@pytest.mark.parametrize("command", ["push", "pull"])
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
        kind = re.sub(r"[0-9a-f]{12,}", "[0-9a-f]+", re.escape(path.split("?")[0])).replace(
            r"\-1", ".*"
        )
        seen[method, kind] = None
    assert len(seen) >= 3
    for method, pattern in seen:
        fault = Fault(method, pattern, 503, 1)
        hub.faults[:] = [fault]
        run()
        assert fault.count == 0, f"{method} {pattern} was not met"


LASTING = [
    ("503 for ever", "GET", "/storage/", 503, "answered 503"),
    ("401", "GET", "/resolve/.*manifest", 401, "refused access"),
    ("a missing file", "GET", "/resolve/.*manifest", 404, "Hugging Face"),
]


@pytest.mark.parametrize(
    ("what", "method", "pattern", "fault", "words"), LASTING, ids=[row[0] for row in LASTING]
)
def test_pull_says_what_lasts_and_leaves_nothing(
    zoo, made, what, method, pattern, fault, words, tmp_path
):
    listed = tmp_path / "zoo_index.json"
    ok(zoo.run("push", made, ZOO, "--index", listed, "--json"))
    zoo.hf.faults += [Fault(method, pattern, fault, 99), Fault("HEAD", pattern, fault, 99)]
    assert words in refused(zoo.run("pull", "demo", "--index", listed))
    assert nothing_left(zoo)
    zoo.hf.faults.clear()
    ok(zoo.run("pull", "demo", "--index", listed, "--json"))


@pytest.mark.parametrize("place", ["huggingface", "modelscope"])
def test_a_flipped_bit_is_found(zoo, made, place, tmp_path):
    listed = tmp_path / "zoo_index.json"
    ok(zoo.run("push", made, ZOO, "--to", place, "--index", listed, "--json"))
    hub = zoo.hf if place == "huggingface" else zoo.ms
    hub.faults.append(Fault("GET", "/storage/", "flip", 99))
    refused(zoo.run("pull", "demo", "--index", listed))
    assert nothing_left(zoo)
    hub.faults.clear()
    ok(zoo.run("pull", "demo", "--index", listed, "--json"))


def test_files_that_were_changed_after_they_were_pulled_are_fetched_again(zoo, made):
    ok(zoo.run("push", made, ZOO, "--json"))
    pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))
    path = Path(pulled["path"]) / "rotations.safetensors"
    good = path.read_bytes()
    path.write_bytes(b"x" + good[1:])
    ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))
    assert path.read_bytes() == good


def test_a_listing_that_omits_a_file(zoo, made):
    """Pull does not rely on listings; `list --remote` says that the file is not there."""
    path = ok(zoo.run("push", made, ZOO, "--json"))["path"]
    zoo.hf.hidden.add(f"{path}/rotations.safetensors")
    assert [
        e["there"] for e in ok(zoo.run("list", "--repo", ZOO, "--remote", "--json"))["entries"]
    ] == [False]
    ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", "huggingface", "--json"))


@pytest.mark.parametrize("path", ["../outside", "/etc", "a/../../b", "a\\\\b", "a//b", ""])
def test_an_index_with_a_path_that_leaves_its_folder_is_refused(zoo, made, tmp_path, path):
    listed = tmp_path / "zoo_index.json"
    ok(zoo.run("push", made, ZOO, "--index", listed, "--json"))
    content = json.loads(listed.read_text())
    content["entries"][0]["copies"][0]["path"] = path
    listed.write_text(json.dumps(content))
    assert "is damaged: entries.0" in refused(zoo.run("pull", "demo", "--index", listed))


def test_a_repository_that_vanished(zoo, made, tmp_path):
    listed = tmp_path / "zoo_index.json"
    ok(zoo.run("push", made, ZOO, "--index", listed, "--json"))
    zoo.hf.remove(ZOO)
    assert f"there is no {ZOO} on Hugging Face" in refused(
        zoo.run("pull", "demo", "--index", listed)
    )
    assert nothing_left(zoo)


@pytest.mark.parametrize("what", [503, "drop", "lost"])
def test_push_gets_over_a_commit_that_fails_once(zoo, made, what):
    """Also when the commit was made and only its answer was lost."""
    zoo.hf.create(ZOO)
    zoo.hf.faults.append(Fault("POST", "/commit/", what, 1))
    sent = ok(zoo.run("push", made, ZOO, "--json"))["hubs"]["huggingface"]
    assert sent["revision"] == zoo.hf.head(ZOO)
    assert zoo.hf.commits(ZOO) == 2


def test_push_with_a_wrong_token(zoo, made, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    text = refused(zoo.run("push", made, ZOO))
    assert "refused access" in text
    assert "hf_wrong" not in text


def test_what_is_not_there(zoo, tmp_path):
    assert "has no rotation for nobody/nothing" in refused(zoo.run("pull", "nobody/nothing"))
    assert "cannot be read" in refused(
        zoo.run("pull", "demo", "--index", tmp_path / "missing.json")
    )
    (tmp_path / "bad.json").write_text("[]")
    assert "is no index" in refused(zoo.run("list", "--index", tmp_path / "bad.json"))
    (tmp_path / "new.json").write_text('{"schema": 99, "entries": []}')
    assert "schema 99" in refused(zoo.run("list", "--index", tmp_path / "new.json"))
    assert "regenerate --plan" in refused(zoo.run("regenerate"), code=2)


def test_somebody_elses_folder_is_not_replaced(zoo, made):
    ok(zoo.run("push", made, ZOO, "--json"))
    (zoo.folder / "mine").mkdir()
    (zoo.folder / "mine" / "notes.txt").write_text("important")
    assert "holds other files" in refused(
        zoo.run("pull", "demo", "--repo", ZOO, "--local-dir", "mine")
    )
    assert (zoo.folder / "mine" / "notes.txt").read_text() == "important"
    pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--local-dir", "theirs", "--json"))
    assert pulled["path"] == "theirs"
    assert verify(Artifact.open(zoo.folder / "theirs")).ok


# ---- the makers' own files


def test_a_rotation_of_the_makers_is_pulled_checked_and_locked(zoo, tmp_path):
    save_foreign(zoo, tmp_path)
    result = zoo.run("pull", "Qwen/Qwen3-8B", "--json")
    pulled = ok(result)
    assert "the index that came with rotationzoo" in result.stderr
    assert "no hash was published" in result.stderr
    assert pulled["format"] == "oscar"
    lock = json.loads((Path(pulled["path"]) / "zoo.lock.json").read_text())
    assert lock["revision"] == zoo.hf.head("Zhongzhu/OSCAR-RotationZoo")
    requests = len([r for r in zoo.hf.requests if "/storage/" in r])
    ok(zoo.run("pull", "Qwen/Qwen3-8B", "--json"))
    assert len([r for r in zoo.hf.requests if "/storage/" in r]) == requests
    save_foreign(zoo, tmp_path, k=foreign(seed=9))
    assert "is not the file that was recorded" in refused(zoo.run("pull", "Qwen/Qwen3-8B"))
    assert json.loads((Path(pulled["path"]) / "zoo.lock.json").read_text()) == lock
    zoo.hf.faults.append(Fault("GET", "/api/models", "drop", 99))
    assert (
        "broke off its answer (RemoteProtocolError); these are the files recorded earlier"
        in zoo.run("pull", "Qwen/Qwen3-8B", "--index", "bundled").stderr
    )


def test_a_pull_goes_on_to_an_engine(zoo, made, tiny, tmp_path, monkeypatch):
    """What the makers publish is imported, bound to its model and exported; our own is exported as
    it is."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    save_foreign(zoo, tmp_path)
    zoo.hf.create("Qwen/Qwen3-8B")
    zoo.hf.commit("Qwen/Qwen3-8B", {"config.json": (tiny / "config.json").read_bytes()})
    done = ok(zoo.run("pull", "Qwen/Qwen3-8B", "--to", "sglang", "--json"))
    assert done["path"] == "exports/Qwen3-8B-oscar-v1-sglang"
    assert sorted(done["files"]) == ["k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"]
    assert "--model-path Qwen/Qwen3-8B" in done["command"][0]
    artifact = Artifact.open(zoo.folder / "rotations" / "Qwen3-8B-imported")
    assert artifact.content["model"]["revision"] == zoo.hf.head("Qwen/Qwen3-8B")
    assert ok(zoo.run("pull", "Qwen/Qwen3-8B", "--to", "sglang", "--json")) == done
    assert "one rotation per KV head" not in zoo.run("pull", "Qwen/Qwen3-8B").stderr
    assert "rotationzoo import" in zoo.run("pull", "Qwen/Qwen3-8B").stderr

    ok(zoo.run("push", made, ZOO, "--json"))
    own = ok(zoo.run("pull", "demo", "--repo", ZOO, "--to", "mlx", "--json"))
    assert own["path"] == "exports/demo-oscar-mlx"
    assert "to accept that, add: --pooled --windows 0/0" in refused(
        zoo.run("pull", "demo", "--repo", ZOO, "--to", "vllm")
    )


class Dangerous:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_files_that_run_code_or_hold_no_rotation_are_refused(zoo, tmp_path):
    save_foreign(zoo, tmp_path, k={"layers": Dangerous()})
    assert "cannot be opened as plain tensors" in refused(zoo.run("pull", "Qwen/Qwen3-8B"))
    assert not (zoo.folder / "pwned").exists()
    bent = foreign("sst_r_h_pbr")
    bent["layers"][1]["rotation"] = bent["layers"][1]["rotation"] * 1.1
    save_foreign(zoo, tmp_path, v=bent)
    save_foreign(zoo, tmp_path, v=bent)
    assert "layer 1 of v_rotation_sst_r_h_pbr.pt is no orthogonal matrix" in refused(
        zoo.run("pull", "Qwen/Qwen3-8B")
    )
    assert nothing_left(zoo)


# ---- the index


def test_the_wheel_carries_the_index():
    root = ROOT
    assert index.WHEEL_COPY.read_bytes() == (root / "zoo_index.json").read_bytes()
    content = index.read(index.WHEEL_COPY)
    assert content.text() == index.WHEEL_COPY.read_text()
    assert {"Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "zai-org/GLM-4.7-FP8"} <= {
        entry.model for entry in content.entries
    }


def test_what_is_published_and_not_pulled_is_listed_with_what_it_is(zoo):
    content = index.read(index.WHEEL_COPY)
    kinds = {(entry.model, entry.format) for entry in content.entries}
    assert {
        (model, "latent")
        for model in ("zai-org/GLM-5.2-FP8", "zai-org/GLM-5.3", "moonshotai/Kimi-K3")
    } <= kinds
    assert ("MiniMaxAI/MiniMax-M3", "oscar") in kinds, (
        "Hadamard matrices, which are read as any others"
    )
    assert len([entry for entry in content.entries if entry.format == "gguf"]) == 3
    assert all(entry.note for entry in content.entries if not entry.pullable)
    listed = zoo.run("list", "GLM-5", "--index", "bundled")
    assert listed.returncode == 0, listed.stderr
    assert "latent" in listed.stdout
    words = refused(zoo.run("pull", "zai-org/GLM-5.3", "--index", "bundled"))
    assert (
        "what is published for zai-org/GLM-5.3 is not pulled: one matrix a layer for the latent"
        in words
    )
    found = lookup.Found(content, "the index")
    entry, _, _ = lookup.choose(found, "Qwen/Qwen3-32B", None, None, ["huggingface"])
    assert entry.format == "oscar", (
        "the pair, although a model with the same rotations is listed too"
    )


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("format", ["rotationzoo", "oscar"])
def test_files_to_be_pulled_need_a_folder(format):
    files = {"rotations.safetensors": index.File(size=1, sha256="0" * 64)}
    with pytest.raises(ValueError, match="need a folder that holds them"):
        index.Entry(
            model="a/b", recipe="oscar", format=format, files=files,
            copies=[index.Copy(hub="huggingface", repo="x/y", path="")],
        )  # fmt: skip


def test_an_entry_twice_is_refused_and_merged_when_it_is_added():
    entry = index.Entry(
        model="a/b", recipe="oscar", files={"rotations.safetensors": index.File(size=1, sha256="0" * 64)},
        copies=[index.Copy(hub="huggingface", repo="x/y", path="p", revision="r1")],
    )  # fmt: skip
    one = index.Index().extended(entry)
    moved = entry.model_copy(
        update={"copies": [index.Copy(hub="modelscope", repo="x/y", path="p", revision="t")]}
    )
    both = one.extended(moved)
    assert [copy.hub for copy in both.entries[0].copies] == ["huggingface", "modelscope"]
    assert index.parse(both.text(), "it") == both
    content = json.loads(one.text())
    content["entries"] *= 2
    with pytest.raises(Exception, match="is listed twice"):
        index.parse(json.dumps(content), "it")
    for change in ({"sha256": "zz"}, {"size": -1}, {"sha256": None}):
        content = json.loads(one.text())
        content["entries"][0]["files"]["rotations.safetensors"] |= change
        with pytest.raises(Exception, match="it is damaged"):
            index.parse(json.dumps(content), "it")


# ---- processes of their own


@pytest.fixture
def outside(command, tmp_path):
    """Both hubs, and the command line in processes of their own."""
    with huggingface.serve() as hf, modelscope.serve() as ms:
        environment = {
            "HF_ENDPOINT": hf.endpoint, "HF_TOKEN": hf.token, "HF_HUB_DISABLE_XET": "1", **ms_environment(ms, tmp_path),
        }  # fmt: skip
        yield SimpleNamespace(
            hf=hf, ms=ms, environment=environment, folder=command.folder, home=tmp_path / "hf",
            run=lambda *words, **options: command(*words, env=environment, **options), all=command.environment | environment,
        )  # fmt: skip


def test_the_commands_as_a_user_runs_them(outside, made):
    assert outside.run("push", made, ZOO, "--to", "both").returncode == 0
    listed = outside.run("list", "--repo", ZOO)
    assert "demo" in listed.stdout
    assert f"Read the index of {ZOO} on huggingface" in listed.stderr
    pulled = outside.run("pull", "demo", "--repo", ZOO, "--quiet")
    assert pulled.returncode == 0, pulled.stderr
    assert outside.run("verify", pulled.stdout.strip(), "--model", "demo").returncode == 0
    assert "ms_test" not in (listed.stdout + listed.stderr + pulled.stderr)


@pytest.mark.parametrize(
    "words",
    [("push", "{made}", ZOO), ("pull", "demo", "--repo", ZOO, "--local-dir", "here")],
    ids=["push", "pull"],
)
def test_killed_in_the_middle(outside, made, words):
    if words[0] == "pull":
        assert outside.run("push", made, ZOO).returncode == 0
    words = [word.format(made=made) for word in words]
    slow = Fault("PUT" if words[0] == "push" else "GET", "/storage/", 503, 99)
    outside.hf.faults.append(slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "rotationzoo", *words],
        cwd=outside.folder,
        env=outside.all,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while slow.count == 99 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert slow.count < 99, "it was in the middle"
    assert not (outside.folder / "here").exists()
    outside.hf.faults.clear()
    again = outside.run(*words)
    assert again.returncode == 0, again.stderr
    if words[0] == "pull":
        assert sorted(path.name for path in outside.folder.iterdir()) == ["here"]
    else:
        assert outside.hf.commits(ZOO) == 2


def test_a_full_disk(outside, made):
    import resource

    assert outside.run("push", made, ZOO).returncode == 0
    limited = outside.run(
        "pull", "demo", "--repo", ZOO, "--local-dir", "here",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )  # fmt: skip
    assert limited.returncode == 1, limited.stderr
    assert "Traceback" not in limited.stderr
    assert not (outside.folder / "here").exists()
    assert outside.run("pull", "demo", "--repo", ZOO, "--local-dir", "here").returncode == 0


def test_help_imports_nothing_heavy():
    program = (
        "import sys; sys.argv = ['rotationzoo', '--help']\nfrom rotationzoo.cli.app import app\n"
    )
    program += "try: app()\nexcept SystemExit: pass\n"
    heavy = "torch", "transformers", "datasets", "modelscope", "modelscope_hub", "huggingface_hub"
    check = f"assert not [m for m in {heavy} if m in sys.modules]"
    assert (
        subprocess.run([sys.executable, "-c", program + check], capture_output=True).returncode == 0
    )


# ---- new rotations for a new revision


def test_a_new_revision_is_planned_regenerated_and_published(zoo, model):
    (first,) = planned(zoo)
    assert first | {"revision": ""} == {
        "model": model, "revision": "", "was": None, "recipe": "configs/model.yaml", "reason": "nothing is published",
    }  # fmt: skip
    words = ["regenerate", model, "--repo", ZOO, *EVALUATED, "--device", "cpu", "--json"]
    made = ok(zoo.run(*words, "--revision", first["revision"], "--output", "first"))
    assert made["compared_with"] is None
    ok(zoo.run("push", "first", ZOO, "--json"))
    assert planned(zoo) == []

    zoo.hf.commit(model, {"README.md": b"better words"})
    assert planned(zoo) == [], "a README is no reason"

    revision = change_weights(zoo, model)
    (due,) = planned(zoo)
    assert due["revision"] == revision
    assert due["was"] == first["revision"]
    assert due["reason"] == "changed: model.safetensors"
    made = ok(zoo.run(*words, "--revision", revision, "--output", "second", "--to", "huggingface"))
    assert made["compared_with"]
    assert abs(made["log_perplexity_difference"]) < 0.05
    request = made["hubs"]["huggingface"]
    assert "/discussions/" in request["url"]
    assert verify(Artifact.open(zoo.folder / "second")).ok
    assert "evaluation.json" in {path.name for path in (zoo.folder / "second").iterdir()}
    listed = index.parse(zoo.hf.files(ZOO, request["revision"])["zoo_index.json"], "the request")
    assert [entry.model_revision for entry in listed.entries if entry.model == model].count(
        revision
    ) == 1
    (zoo.folder / "configs" / "model.yaml").write_text(CONFIG.replace("2048", "1024"))
    assert planned(zoo)[0]["reason"] == "the recipe has changed"


def test_worse_rotations_are_not_published(zoo, model, monkeypatch):
    from rotationzoo.zoo import regenerate

    revision = planned(zoo)[0]["revision"]
    words = ["regenerate", model, "--repo", ZOO, *EVALUATED, "--device", "cpu", "--json"]
    ok(zoo.run(*words, "--revision", revision, "--output", "first"))
    ok(zoo.run("push", "first", ZOO, "--json"))
    commits = zoo.hf.commits(ZOO)
    change_weights(zoo, model)
    plain = CONFIG.replace(
        "extends: oscar", "extends: identity\nname: plain"
    )  # no rotation is worse than any
    (zoo.folder / "configs" / "model.yaml").write_text(plain)
    # Longer texts and a small window: with few quantized tokens the difference is within the noise.
    text = refused(
        zoo.run(
            *words,
            "--output",
            "worse",
            "--to",
            "huggingface",
            "--tokens",
            "8192",
            "--length",
            "512",
        )
    )
    assert "are worse than the published ones" in text
    assert zoo.hf.commits(ZOO) == commits
    assert regenerate.is_worse(0.01, 0.001)
    assert not regenerate.is_worse(0.01, 0.006)
    assert not regenerate.is_worse(0.0009, 0.0001)


def test_what_cannot_be_planned(zoo, model, tmp_path):
    assert "there are no recipe files in" in refused(
        zoo.run("regenerate", "--plan", "--configs", tmp_path / "none")
    )
    assert "has no recipe for someone/else" in refused(zoo.run("regenerate", "someone/else"))
    zoo.hf.remove(model)
    assert f"there is no {model} on Hugging Face" in refused(
        zoo.run("regenerate", "--plan", "--repo", ZOO)
    )


def test_a_launch_line_names_a_model_that_is_there(zoo, made, tmp_path):
    """The demo's folder; for another folder, whose place no artifact records, what to put there."""
    from rotationzoo.model.source import DEMO

    ok(zoo.run("push", made, ZOO, "--json"))
    done = ok(zoo.run("pull", "demo", "--repo", ZOO, "--to", "sglang", "--json"))
    model = shlex.split(done["command"][0])[
        shlex.split(done["command"][0]).index("--model-path") + 1
    ]
    assert Path(model) == DEMO
    assert not [note for note in done["notes"] if "MODEL" in note]
    local = shutil.copytree(made, tmp_path / "local")
    manifest = json.loads((local / "manifest.json").read_text())
    manifest["model"]["id"] = "my-model"
    (local / "manifest.json").write_text(json.dumps(manifest))
    done = ok(zoo.run("export", local, "--to", "sglang", "--output", "local-export", "--json"))
    assert "--model-path MODEL" in done["command"][0]
    assert (
        "MODEL in the command stands for my-model: put its folder or hub id there" in done["notes"]
    )
