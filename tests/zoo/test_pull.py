"""Pulling: pinned revisions, files that are already here, places, and exports."""

from pathlib import Path

import huggingface_hub
import pytest
from support.published import ZOO, foreign, nothing_left, ok, publish_oscar_pair, refused

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.zoo import index


def test_a_pinned_pull_is_not_moved_by_a_later_commit(zoo, made, tmp_path):
    listed = tmp_path / "zoo_index.json"
    first = ok(zoo.run("push", made, ZOO, "--index", listed, "--json"))
    path = first["path"]
    zoo.hf.commit(ZOO, {f"{path}/README.md": b"changed later"})
    pulled = ok(zoo.run("pull", "demo", "--index", listed, "--json"))
    assert pulled["revision"] == first["hubs"]["huggingface"]["revision"] != zoo.hf.head(ZOO)
    card = (Path(pulled["path"]) / "README.md").read_text(encoding="utf-8")
    assert f"    rotationzoo pull demo --repo {ZOO}\n" in card, "the card as it was published"
    assert index.read(listed).entries[0].copies[0].revision == pulled["revision"]
    requests = len(zoo.hf.requests)
    with pytest.MonkeyPatch.context() as offline:
        offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert ok(zoo.run("pull", "demo", "--index", listed, "--json"))["path"] == pulled["path"]
    assert len(zoo.hf.requests) == requests, "offline by pinned revision"


def test_changed_files_are_fetched_again_and_somebody_elses_folder_is_not_replaced(zoo, made):
    ok(zoo.run("push", made, ZOO, "--json"))
    pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))
    path = Path(pulled["path"]) / "rotations.safetensors"
    good = path.read_bytes()
    path.write_bytes(b"x" + good[1:])
    ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))
    assert path.read_bytes() == good
    (zoo.folder / "mine").mkdir()
    (zoo.folder / "mine" / "notes.txt").write_text("important")
    assert "holds other files" in refused(
        zoo.run("pull", "demo", "--repo", ZOO, "--local-dir", "mine")
    )
    assert (zoo.folder / "mine" / "notes.txt").read_text() == "important"
    pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--local-dir", "theirs", "--json"))
    assert pulled["path"] == "theirs"
    assert verify(Artifact.open(zoo.folder / "theirs")).ok


def test_a_pull_goes_on_to_an_engine(zoo, tiny, tmp_path):
    """Files of OSCAR's authors are imported, bound to their model and exported."""
    publish_oscar_pair(zoo, tmp_path)
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


def test_a_rotation_of_the_makers_is_pulled_and_checked(zoo, tmp_path):
    publish_oscar_pair(zoo, tmp_path)
    result = zoo.run("pull", "Qwen/Qwen3-8B", "--json")
    pulled = ok(result)
    assert "the index that came with rotationzoo" in result.stderr
    assert "no hash was published" in result.stderr
    assert pulled["format"] == "oscar"
    assert pulled["revision"] == zoo.hf.head("Zhongzhu/OSCAR-RotationZoo")
    publish_oscar_pair(zoo, tmp_path, k=foreign(seed=9))
    again = ok(zoo.run("pull", "Qwen/Qwen3-8B", "--json"))
    assert again["revision"] == zoo.hf.head("Zhongzhu/OSCAR-RotationZoo")
    assert again["path"] != pulled["path"]
    assert again["files"] != pulled["files"]
    place = ["--local-dir", "mine"]
    ok(zoo.run("pull", "Qwen/Qwen3-8B", *place, "--json"))
    assert "holds other files" in refused(zoo.run("pull", "Qwen/Qwen3-8B", *place))


def test_files_that_hold_no_rotation_are_refused(zoo, tmp_path):
    bent = foreign("sst_r_h_pbr")
    bent["layers"][1]["rotation"] = bent["layers"][1]["rotation"] * 1.1
    publish_oscar_pair(zoo, tmp_path, v=bent)
    assert "layer 1 of v_rotation_sst_r_h_pbr.pt is not an orthogonal matrix" in refused(
        zoo.run("pull", "Qwen/Qwen3-8B")
    )
    assert nothing_left(zoo)
