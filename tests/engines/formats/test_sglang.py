"""SGLang's pair of `.pt` files: versions, names and notes."""

import numpy as np
import torch
from support import engine_readers as engines
from support.engine_artifacts import CENTERED, attend, check_engine, exported, layers_of, rows_of
from support.tensors import stored_rotations, stored_statistics

from rotationzoo.recipe.loading import PRESETS


def test_sglang_version_2_and_pooled_rotations(made, tmp_path):
    """Version 1 is compared whole with what OSCAR's own tools write, in `test_import`."""
    artifact = made(head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    assert sorted(done.files) == ["k_rotation_perhead.pt", "v_rotation_perhead.pt"]
    content = torch.load(done.path / "k_rotation_perhead.pt", weights_only=True)
    assert " ".join(content) == "format_version objective source_grouping calibration layers"
    assert (content["format_version"], content["source_grouping"]) == (2, "per_kv_head")
    assert [type(layer) for layer in content["layers"]] == [int] * 4
    assert content["layers"][1]["rotation"].shape == (2, 32, 32)
    assert (content["layers"][1]["eigenvalues"].diff(dim=-1) >= 0).all()
    calibration = content["calibration"]
    assert {type(value) for value in calibration.values()} <= {str, int, float, bool}
    assert (calibration["artifact"], calibration["key_clip"]) == (artifact.identity, 0.96)
    pooled = exported("sglang", artifact, tmp_path / "pooled", pooled=True)
    content = torch.load(pooled.path / "k_rotation_qqt_r_h_pbr.pt", weights_only=True)
    assert (content["format_version"], content["source_grouping"]) == (1, "layer")
    # The rotation of the mean moment, not the mean of rotations.
    moment = stored_statistics(artifact)["layers.1.query.second_moment"].mean(0)
    eigenvalues = content["layers"][1]["eigenvalues"].double()
    assert torch.allclose(eigenvalues, torch.linalg.eigvalsh(moment), rtol=1e-5)


def test_sglang_version_3_carries_the_key_mean(made, tmp_path):
    artifact = made(recipe=CENTERED, head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    assert sorted(done.files) == ["k_rotation_oscar2_center.pt", "v_rotation_oscar2_center.pt"]
    keys = torch.load(done.path / "k_rotation_oscar2_center.pt", weights_only=True)
    assert keys["format_version"] == 3
    assert keys["transform"] == {"key": "center", "centered": True, "orthogonal": True}
    mean = stored_statistics(artifact)["layers.2.key.mean"]
    assert torch.equal(keys["layers"][2]["k_mean"], mean.float())
    values = torch.load(done.path / "v_rotation_oscar2_center.pt")
    assert values["transform"] == {"value": "pre_wo", "centered": False, "orthogonal": True}
    assert not any("k_mean" in entry for entry in values["layers"].values())
    check_engine("sglang", artifact, done)
    # the mean taken from all keys moves every score of a query by the same number
    layer = layers_of(artifact)[2]
    rotate = engines.read_sglang(done.path, done.launch.environment, layer.kv_heads)
    q, k, v = (rows_of(layer, side).numpy() for side in ("key", "key", "value"))
    rotated_q = q @ stored_rotations(artifact)["layers.2.key.rotation"].numpy()
    assert np.abs(attend(rotated_q, rotate("key", 2, k), v) - attend(q, k, v)).max() < 1e-4
    shared = exported("sglang", artifact, tmp_path / "pooled", pooled=True)
    entry = torch.load(shared.path / "k_rotation_oscar2_center.pt")["layers"][0]
    assert (entry["rotation"].shape, entry["k_mean"].shape) == ((32, 32), (2, 32))


def test_a_data_free_artifact_says_so_in_its_name(made, tmp_path):
    artifact = made(recipe=PRESETS["hadamard"], head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    assert sorted(done.files) == [f"{side}_rotation_hadamard_perhead.pt" for side in "kv"]
    done = exported("sglang", artifact, tmp_path / "2", pooled=True)
    assert sorted(done.files) == ["k_rotation_hadamard.pt", "v_rotation_hadamard.pt"]
