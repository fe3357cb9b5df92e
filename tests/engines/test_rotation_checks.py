"""What is broken or ambiguous in a pair of files is found and named."""

import json
import os

import pytest
import torch
from support.oscar_files import DIM, KEY, VALUE, deep, model_of, moments, published, refused
from support.tensors import stored_rotations

from rotationzoo.checks.verify import verify
from rotationzoo.engines.import_ import import_
from rotationzoo.settings import Import

# What some file in the world holds where a table of ours is, or was put there to do harm.
SAID = {
    "transform": {"transform": "center"},
    "objective of a list": {"objective": [1]},
    "objective of lines": {"objective": "qqt_r_h_pbr\n\x1b[2J"},
    "version": {"format_version": [3]},
}
CALIBRATIONS = {
    "list": ["a list"],
    "statistic": {"key_statistic": "foo", "key_clip": 0.9, "group_size": "64"},
    "nested": deep(200),
    "tensors": {"model": torch.ones(3), "generation_id": torch.ones(2)},
    "huge numbers": {"tokens": 10**60, "key_clip": float("nan"), "value_clip": float("inf")},
    "half a character": {"model": "\ud800"},
    "groups": {"group_size": -64},
}
SAID |= {name: {"calibration": said} for name, said in CALIBRATIONS.items()}


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("name", [*SAID, "composition", "string ids"])
def test_odd_words_around_good_matrices_do_no_harm(pair, name):
    """They are left out, and the matrices are imported."""
    for side in (pair.key, pair.value):
        side.update(SAID.get(name, {}))
        if name == "string ids":
            layers = side["layers"].items()
            side["layers"] = {str(i): {**entry, "layer_id": str(i)} for i, entry in layers}
    if name == "composition":
        said = {"calibration": {"composition": "foo"}}
        pair.key |= {"objective": "oscar2_perhead", **said}
        pair.value |= {"objective": "oscar2_v_pre_wo", **said}
    artifact = pair.read()
    assert verify(artifact).ok
    read = stored_rotations(artifact)["layers.1.key.rotation"][0]
    assert torch.equal(read, published(moments("key")[1])[0])
    manifest, card = (artifact.folder / name for name in ("manifest.json", "README.md"))
    assert "\x1b" not in json.dumps(json.loads(manifest.read_bytes()), ensure_ascii=False)
    assert manifest.stat().st_size + card.stat().st_size < 200_000


def in_layer(number: int, key: str, change):
    """A change of what the keys of one layer have under this name."""

    def apply(pair) -> None:
        entry = pair.key["layers"][number]
        entry[key] = change(entry.get(key))

    return apply


def lose_on_both_sides(pair) -> None:
    del pair.key["layers"][3], pair.value["layers"][3]


def come_of_two_runs(pair) -> None:
    pair.key["calibration"], pair.value["calibration"] = {"generation_id": "a"}, {}


NO_TABLE = f"of layer 2 in {KEY} is not a table of real numbers"
BROKEN = {
    "v_rotation_sst_r_h_pbr.pt has no layer 3": lambda pair: pair.value["layers"].pop(3),
    "they have no key rotation for layer 3": lose_on_both_sides,
    f"layer 3 of {KEY} is not an orthogonal matrix": in_layer(3, "rotation", lambda m: m * 1.01),
    f"layer 3 of {KEY} is not finite": in_layer(3, "rotation", lambda m: m * float("nan")),
    "hold the same matrices": lambda pair: pair.value.update(layers=pair.key["layers"]),
    f"the eigenvalues {NO_TABLE}": in_layer(2, "eigenvalues", lambda _: torch.tensor(3.0)),
    "negative eigenvalues": in_layer(2, "eigenvalues", lambda values: values - values.mean()),
    f"the rotation {NO_TABLE}": in_layer(2, "rotation", lambda m: m.to(torch.complex64)),
    "has layer 2 twice": lambda pair: pair.key["layers"].update({"2": pair.key["layers"][2]}),
    "has no eigenvalues for layer 2, and has": in_layer(2, "eigenvalues", lambda _: None),
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
    manifest = tmp_path / "imported" / "manifest.json"
    before = manifest.stat().st_ino
    read(folder / KEY, folder / VALUE)
    assert manifest.stat().st_ino == before, "the same import is not done twice"
    assert "there is no file for the values" in refused(read, folder / KEY, to="two")


class Dangerous:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_files_that_run_code_are_refused(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pair.key["layers"][0]["note"] = Dangerous()
    assert "cannot be opened as plain tensors" in pair.refused()
    assert not (tmp_path / "pwned").exists()
