"""What OSCAR's authors publish: files without hashes, recorded when they are first pulled."""

import json
from pathlib import Path

from support.hubs.hub import Fault
from support.published import foreign, nothing_left, ok, publish_oscar_pair, refused


def test_a_rotation_of_the_makers_is_pulled_checked_and_locked(zoo, tmp_path):
    publish_oscar_pair(zoo, tmp_path)
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
    publish_oscar_pair(zoo, tmp_path, k=foreign(seed=9))
    assert "is not the file that was recorded" in refused(zoo.run("pull", "Qwen/Qwen3-8B"))
    assert json.loads((Path(pulled["path"]) / "zoo.lock.json").read_text()) == lock
    zoo.hf.faults.append(Fault("GET", "/api/models", "drop", 99))
    assert (
        "broke off its answer (RemoteProtocolError); these are the files recorded earlier"
        in zoo.run("pull", "Qwen/Qwen3-8B", "--index", "bundled").stderr
    )


def test_files_that_hold_no_rotation_are_refused(zoo, tmp_path):
    bent = foreign("sst_r_h_pbr")
    bent["layers"][1]["rotation"] = bent["layers"][1]["rotation"] * 1.1
    publish_oscar_pair(zoo, tmp_path, v=bent)
    assert "layer 1 of v_rotation_sst_r_h_pbr.pt is no orthogonal matrix" in refused(
        zoo.run("pull", "Qwen/Qwen3-8B")
    )
    assert nothing_left(zoo)
