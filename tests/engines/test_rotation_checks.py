"""What is broken or ambiguous in a pair of files is found and named."""

import os

import pytest
import torch
from support.oscar_files import DIM, KEY, LAYERS, VALUE, model_of, moments, published, refused
from support.tensors import stored_rotations

from rotationzoo.checks.verify import verify
from rotationzoo.engines.import_ import import_
from rotationzoo.errors import RotationZooError
from rotationzoo.settings import Import

# What some file in the world holds where a table of ours is.
ODD = {
    "transform": lambda pair: pair.key.update(transform="center"),
    "calibration": lambda pair: calibrated(pair, ["a list"]),
    "statistic": lambda pair: calibrated(
        pair, {"key_statistic": "foo", "key_clip": 0.9, "group_size": "64"}
    ),
    "composition": lambda pair: calibrated(
        pair, {"composition": "foo"}, "oscar2_perhead", "oscar2_v_pre_wo"
    ),
    "string ids": lambda pair: pair.key.update(
        layers={str(i): {**entry, "layer_id": str(i)} for i, entry in pair.key["layers"].items()}
    ),
}


def calibrated(pair, said, *objectives: str) -> None:
    """Let both files say this of their calibration, and perhaps of what they hold."""
    pair.key["calibration"] = pair.value["calibration"] = said
    for side, objective in zip((pair.key, pair.value), objectives, strict=False):
        side["objective"] = objective


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_odd_tables_do_no_harm(pair, change):
    change(pair)
    artifact = pair.read()
    assert verify(artifact).ok
    assert torch.equal(
        stored_rotations(artifact)["layers.1.key.rotation"][0], published(moments("key")[1])[0]
    )


def in_layer(number: int, key: str, change):
    """A change of what the keys of one layer have under this name."""

    def apply(pair) -> None:
        entry = pair.key["layers"][number]
        entry[key] = change(entry.get(key))

    return apply


def lose_on_both_sides(pair) -> None:
    del pair.key["layers"][5], pair.value["layers"][5]


def come_of_two_runs(pair) -> None:
    pair.key["calibration"], pair.value["calibration"] = (
        {"generation_id": name} for name in ("a", "b")
    )


BROKEN = {
    "v_rotation_sst_r_h_pbr.pt has no layer 5": lambda pair: pair.value["layers"].pop(5),
    "they have no key rotation for layer 5": lose_on_both_sides,
    f"layer 3 of {KEY} is not an orthogonal matrix": in_layer(3, "rotation", lambda m: m * 1.01),
    f"layer 3 of {KEY} is not finite": in_layer(3, "rotation", lambda m: m * float("nan")),
    "hold the same matrices": lambda pair: pair.value.update(layers=pair.key["layers"]),
    f"the eigenvalues of layer 2 in {KEY} is not a table of real numbers": in_layer(
        2, "eigenvalues", lambda _: torch.tensor(3.0)
    ),
    "negative eigenvalues": in_layer(2, "eigenvalues", lambda values: values - values.mean()),
    f"the rotation of layer 2 in {KEY} is not a table of real numbers": in_layer(
        2, "rotation", lambda matrix: matrix.to(torch.complex64)
    ),
    "has layer 2 twice": lambda pair: pair.key["layers"].update({"2": pair.key["layers"][2]}),
    "has no eigenvalues for layer 2, and has for others": lambda pair: pair.key["layers"][2].pop(
        "eigenvalues"
    ),
    "the entry of layer 2 says that it is layer 3": in_layer(2, "layer_id", lambda _: 3),
    "is not a square matrix": in_layer(2, "rotation", lambda matrix: matrix[:32]),
    "not orthogonal, with a second matrix": in_layer(0, "q_rotation", lambda _: torch.eye(DIM)),
    "do not belong together: their generation_id differs": come_of_two_runs,
    "it has no table of layers": lambda pair: pair.key.pop("layers"),
}


@pytest.mark.parametrize("words", BROKEN)
def test_what_is_broken_is_named(pair, words):
    BROKEN[words](pair)
    assert words in pair.refused()


def test_files_whose_names_tell_the_side(pair):
    said = f"{KEY} is named as keys and says that it holds values"
    assert said in pair.refused(VALUE, KEY)
    pair.key["objective"] = pair.value["objective"] = "unheard of"
    assert "holds no pair of rotation files" in pair.refused("a.pt", "b.pt")


def test_a_pair_that_somebody_is_writing(pair, tmp_path):
    folder, model = pair.write(), model_of(tmp_path / "model")

    def read(*paths, to: str = "imported", **options):
        return import_(Import([*paths], tmp_path / to, model, **options))

    pending = folder / ".oscar_0123456789abcdef.pending.json"
    pending.write_text("{}")
    assert "left half-written" in refused(read, folder)
    pending.unlink()
    (folder / "k_rotation_perhead.pt").write_bytes((folder / KEY).read_bytes())
    assert "holds several pairs" in refused(read, folder)
    artifact = read(folder / VALUE, folder / KEY)
    assert artifact.content["imported"]["format"] == "V1"
    before = (tmp_path / "imported" / "manifest.json").stat().st_ino
    read(folder / KEY, folder / VALUE)
    again = (tmp_path / "imported" / "manifest.json").stat().st_ino
    assert again == before, "the same import is not done twice"
    with pytest.raises(RotationZooError, match="holds the work of another job"):
        read(folder / VALUE, folder / KEY, clip=(1.0, 1.0))
    with pytest.raises(RotationZooError, match="there is no file for the values"):
        read(folder / KEY, to="two")


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
