"""`verify` finds each kind of damage, and names the layer."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import edit_manifest
from support.jobs import job
from support.models import save_tiny

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import PRESETS
from rotationzoo.storage.files import sha256


@pytest.fixture
def copy(calibrated, tmp_path) -> Artifact:
    """An artifact to damage."""
    return Artifact.open(Path(shutil.copytree(calibrated.folder, tmp_path / "copy")))


def file_entry(path: Path) -> dict:
    """What a manifest says of a file."""
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def test_verify_finds_each_kind_of_damage(copy):
    def problems(change) -> str:
        tensors = load_file(copy.folder / "rotations.safetensors")
        change(tensors)
        save_file(tensors, copy.folder / "rotations.safetensors")
        entry = file_entry(copy.folder / "rotations.safetensors")
        edit_manifest(copy.folder, files={**copy.content["files"], "rotations.safetensors": entry})
        verification = verify(Artifact.open(copy.folder))
        assert not verification.ok
        return "; ".join(verification.problems)

    original = load_file(copy.folder / "rotations.safetensors")

    def swap(tensors):
        for name in list(original):
            if ".key." in name:
                value_name = name.replace(".key.", ".value.")
                tensors[name] = original[value_name].clone()
                tensors[value_name] = original[name].clone()

    assert "key and value swapped: layers 0, 1" in problems(swap)
    save_file(original, copy.folder / "rotations.safetensors")
    assert "key rotation missing: layer 1" in problems(lambda t: t.pop("layers.1.key.rotation"))
    save_file(original, copy.folder / "rotations.safetensors")
    assert "value rotation not finite: layer 0" in problems(
        lambda t: t["layers.0.value.rotation"].fill_(float("nan"))
    )
    save_file(original, copy.folder / "rotations.safetensors")
    assert "key rotation not orthogonal: layer 0" in problems(
        lambda t: t["layers.0.key.rotation"].mul_(1.001)
    )
    save_file(original, copy.folder / "rotations.safetensors")

    def other_layer(tensors):
        tensors["layers.0.key.rotation"] = original["layers.1.key.rotation"].clone()

    assert "do not come from the stored statistics" in problems(other_layer)
    save_file(original, copy.folder / "rotations.safetensors")
    assert "belong to no layer" in problems(
        lambda t: t.update({"layers.9.key.rotation": t["layers.0.key.rotation"].clone()})
    )


def test_verify_checks_what_no_statistics_back(tiny, tmp_path):
    artifact = calibrate(job(tiny, tmp_path, PRESETS["random"]))
    tensors = artifact.rotation_tensors()

    def problems(tensors, **manifest):
        save_file(tensors, artifact.folder / "rotations.safetensors")
        files = {"rotations.safetensors": file_entry(artifact.folder / "rotations.safetensors")}
        edit_manifest(artifact.folder, **{**artifact.content, "files": files, **manifest})
        return "; ".join(verify(Artifact.open(artifact.folder)).problems)

    assert problems(tensors) == ""
    swapped = {
        name.replace(".key.", ".X.").replace(".value.", ".key.").replace(".X.", ".value."): tensor
        for name, tensor in tensors.items()
    }
    assert "key rotation not the one that random makes: layers 0, 1" in problems(swapped)
    clipped = tensors | {"layers.1.key.clip": -3 * torch.ones_like(tensors["layers.1.key.clip"])}
    assert "key clip ratio not that of the recipe: layer 1" in problems(clipped)
    edited = {**artifact.content["recipe"], "recent": 8}
    assert "recipe in the manifest is not the one that was used" in problems(tensors, recipe=edited)
    with pytest.raises(RotationZooError, match=r"damaged: geometry\.0\.index: Field required"):
        problems(tensors, geometry=[{}])
    edit_manifest(artifact.folder, **artifact.content)
    (artifact.folder / "rotations.safetensors").unlink()
    # Opened again: an artifact reads each of its files once.
    verification = verify(Artifact.open(artifact.folder))
    assert verification.orthogonality_error is None
    assert "rotations.safetensors is missing" in verification.problems


def test_damaged_manifests_get_a_sentence(copy):
    for content in (
        "{",
        "[]",
        '{"schema": 1}',
        '{"schema": 9}',
        json.dumps({**copy.content, "geometry": None}),
    ):
        (copy.folder / "manifest.json").write_text(content)
        with pytest.raises(RotationZooError):
            Artifact.open(copy.folder)


def test_verify_finds_a_flipped_bit(copy):
    path = copy.folder / "statistics.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    assert verify(copy).problems == [
        "statistics.safetensors is not the file that was written: its sha256 differs"
    ]


def test_verify_knows_the_model(calibrated, tiny, tmp_path):
    assert verify(calibrated, str(tiny)).ok
    other = save_tiny(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][-1, -1] += 0.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert "made for other weights" in verify(calibrated, str(other)).problems[0]
    (other / "model.safetensors").unlink()
    assert verify(calibrated, str(other)).ok, "with the config alone nothing tells them apart"
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert "made for another model" in verify(calibrated, str(other)).problems[0]
