"""What is broken or ambiguous in a pair of files is found and named."""

import os

import pytest
import torch
from support.oscar_files import DIM, KEY, LAYERS, VALUE, model_of, moments, published, refused
from support.tensors import stored_rotations

from rotationzoo.checks.verify import verify
from rotationzoo.engines.import_ import Import, import_
from rotationzoo.errors import RotationZooError


def broken(name: str, pair) -> tuple[str, ...]:
    """Break a pair; the file names if they are part of it."""
    key, value = pair.key["layers"], pair.value["layers"]
    if name == "swapped by name":
        return VALUE, KEY
    if name == "layer missing on one side":
        del value[5]
    elif name == "layer missing on both":
        del key[5], value[5]
    elif name == "not orthogonal":
        key[3]["rotation"] = key[3]["rotation"] * 1.01
    elif name == "not finite":
        value[3]["rotation"][0, 0] = float("nan")
    elif name == "the same matrices":
        pair.value = {**pair.key, "objective": "sst_r_h_pbr"}
    elif name == "eigenvalues in no order":
        order = torch.randperm(DIM, generator=torch.Generator().manual_seed(0))
        key[2]["eigenvalues"] = key[2]["eigenvalues"][order]
    elif name == "eigenvalues of a number":
        key[2]["eigenvalues"] = torch.tensor(3.0)
    elif name == "eigenvalues below zero":
        key[2]["eigenvalues"] = key[2]["eigenvalues"] - key[2]["eigenvalues"].mean()
    elif name == "complex":
        key[2]["rotation"] = key[2]["rotation"].to(torch.complex64)
    elif name == "twice":
        key["2"] = key[2]
    elif name == "eigenvalues in some layers":
        del key[2]["eigenvalues"]
    elif name == "wrong layer id":
        key[2]["layer_id"] = 3
    elif name == "not square":
        key[2]["rotation"] = key[2]["rotation"][:32]
    elif name == "no orthogonal pair":
        key[0]["q_rotation"] = key[0]["rotation"]
    elif name == "of two runs":
        pair.key["calibration"] = {"generation_id": "a"}
        pair.value["calibration"] = {"generation_id": "b"}
    elif name == "no side":
        pair.key["objective"] = pair.value["objective"] = "unheard of"
        return "a.pt", "b.pt"
    elif name == "no table":
        pair.key = {"rotation": key[0]["rotation"], "step": 3}
    return ()


def junk(name: str, pair) -> None:
    """What some file in the world holds where a table of ours is."""
    key = pair.key["layers"]
    if name == "transform":
        pair.key["transform"] = "center"
    elif name == "calibration":
        pair.key["calibration"] = pair.value["calibration"] = ["a list"]
    elif name == "statistic":
        pair.key["calibration"] = pair.value["calibration"] = {
            "key_statistic": "foo",
            "key_clip": 0.9,
            "group_size": "64",
        }
    elif name == "composition":
        pair.key["objective"], pair.value["objective"] = "oscar2_perhead", "oscar2_v_pre_wo"
        pair.key["calibration"] = pair.value["calibration"] = {"composition": "foo"}
    elif name == "string ids":
        pair.key["layers"] = {str(i): {**entry, "layer_id": str(i)} for i, entry in key.items()}


@pytest.mark.parametrize(
    "name", ["transform", "calibration", "statistic", "composition", "string ids"]
)
def test_odd_tables_do_no_harm(pair, name):
    junk(name, pair)
    artifact = pair.read()
    assert verify(artifact).ok
    assert torch.equal(
        stored_rotations(artifact)["layers.1.key.rotation"][0], published(moments("key")[1])[0]
    )


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "swapped by name": f"{KEY} is named as keys and says that it holds values",
        "layer missing on one side": "v_rotation_sst_r_h_pbr.pt has no layer 5",
        "layer missing on both": "they have no key rotation for layer 5",
        "not orthogonal": "layer 3 of k_rotation_qqt_r_h_pbr.pt is no orthogonal matrix",
        "not finite": "layer 3 of v_rotation_sst_r_h_pbr.pt is not finite",
        "the same matrices": "hold the same matrices",
        "eigenvalues in no order": f"eigenvalues of layer 2 in {KEY} are in no order",
        "eigenvalues of a number": f"the eigenvalues of layer 2 in {KEY} is no table of real "
        "numbers",
        "eigenvalues below zero": "negative eigenvalues",
        "complex": f"the rotation of layer 2 in {KEY} is no table of real numbers",
        "twice": "has layer 2 twice",
        "eigenvalues in some layers": "has no eigenvalues for layer 2, and has for others",
        "wrong layer id": "the entry of layer 2 says that it is layer 3",
        "not square": "is no square matrix",
        "no orthogonal pair": "not orthogonal, with a second matrix",
        "of two runs": "do not belong together: their generation_id differs",
        "no side": "holds no pair of rotation files",
        "no table": "it has no table of layers",
    }.items(),
    ids=lambda value: value if " " not in value[:40] else None,
)
def test_what_is_broken_is_named(pair, name, words):
    assert words in pair.refused(*broken(name, pair))


def test_a_pair_that_somebody_is_writing(pair, tmp_path):
    folder, model = pair.write(), model_of(tmp_path / "model")
    pending = folder / ".oscar_0123456789abcdef.pending.json"
    pending.write_text("{}")
    assert "left half-written" in refused(import_, Import([folder], tmp_path / "imported", model))
    pending.unlink()
    (folder / "k_rotation_perhead.pt").write_bytes((folder / KEY).read_bytes())
    assert "holds several pairs" in refused(import_, Import([folder], tmp_path / "imported", model))
    artifact = import_(Import([folder / VALUE, folder / KEY], tmp_path / "imported", model))
    assert artifact.content["imported"]["format"] == "V1"
    before = (tmp_path / "imported" / "manifest.json").stat().st_ino
    import_(Import([folder / KEY, folder / VALUE], tmp_path / "imported", model))
    assert (tmp_path / "imported" / "manifest.json").stat().st_ino == before, (
        "the same import is not done twice"
    )
    with pytest.raises(RotationZooError, match="holds other work"):
        import_(
            Import([folder / VALUE, folder / KEY], tmp_path / "imported", model, clip=(1.0, 1.0))
        )
    with pytest.raises(RotationZooError, match="there is no file for the values"):
        import_(Import([folder / KEY], tmp_path / "two", model))


class Dangerous:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_files_that_run_code_are_refused(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pair.key["layers"][0]["note"] = Dangerous()
    assert "cannot be opened as plain tensors" in pair.refused()
    assert not (tmp_path / "pwned").exists()


def test_honest_data_free_files(pair):
    eye = {i: {"layer_id": i, "rotation": torch.eye(DIM)} for i in range(LAYERS)}
    pair.key = {"format_version": "identity-v1", "objective": "identity-k", "layers": eye}
    pair.value = {"format_version": "identity-v1", "objective": "identity-v", "layers": eye}
    artifact = pair.read("k_rotation.pt", "v_rotation.pt")
    assert artifact.content["recipe"]["composition"] == "identity"
    assert verify(artifact).ok, verify(artifact).problems
