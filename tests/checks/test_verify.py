"""`verify` finds each kind of damage and names the layer, and says whose rotations they are."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from support.command_line import edited_manifest, only_error, put_file, succeeded
from support.jobs import job
from support.models import edit_config, edited_weights, save_tiny
from support.tensors import stored_rotations

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.model.source import DEMO
from rotationzoo.recipe.loading import PRESETS


@pytest.fixture
def copy(calibrated, tmp_path) -> Artifact:
    """An artifact to damage."""
    return Artifact.open(Path(shutil.copytree(calibrated.folder, tmp_path / "copy")))


def swapped(tensors: dict) -> dict:
    """The tensors of keys under the names of values, and the reverse."""
    other = {".key.": ".value.", ".value.": ".key."}
    pattern = r"\.key\.|\.value\."
    names = {re.sub(pattern, lambda side: other[side[0]], name): name for name in tensors}
    return {new: tensors[name] for new, name in names.items()}


def test_verify_finds_what_is_wrong_with_rotations(copy):
    """tests/artifact/test_damaged_files.py has what no command reads."""
    tensors = load_file(copy.folder / "rotations.safetensors")
    of_another = {"layers.0.key.rotation": tensors["layers.1.key.rotation"].clone()}
    for changed, problem in (
        (swapped(tensors), "key and value swapped: layers 0, 1"),
        (tensors | of_another, "do not come from the stored statistics"),
    ):
        put_file(copy.folder, "rotations.safetensors", save(changed))
        assert problem in "; ".join(verify(Artifact.open(copy.folder)).problems)


def test_verify_checks_what_no_statistics_back(tiny, tmp_path):
    artifact = calibrate(job(tiny, tmp_path, PRESETS["random"]))
    tensors = stored_rotations(artifact)

    def problems(tensors, **manifest):
        with edited_manifest(artifact.folder) as content:
            content |= artifact.content | manifest
        put_file(artifact.folder, "rotations.safetensors", save(tensors))
        return "; ".join(verify(Artifact.open(artifact.folder)).problems)

    assert problems(tensors) == ""
    random = "key rotation not the one that random makes: layers 0, 1"
    assert random in problems(swapped(tensors))
    clipped = tensors | {"layers.1.key.clip": -3 * torch.ones_like(tensors["layers.1.key.clip"])}
    assert "key clip ratio not that of the recipe: layer 1" in problems(clipped)
    edited = {**artifact.content["recipe"], "recent": 8}
    assert "recipe in the manifest is not the one that was used" in problems(tensors, recipe=edited)
    with pytest.raises(RotationZooError, match=r"damaged: geometry\.0\.index: Field required"):
        problems(tensors, geometry=[{}])
    with edited_manifest(artifact.folder) as content:
        content |= artifact.content
    (artifact.folder / "rotations.safetensors").unlink()
    # Opened again: an artifact reads each of its files once.
    verification = verify(Artifact.open(artifact.folder))
    assert verification.orthogonality_error is None
    assert "rotations.safetensors is missing" in verification.problems


def test_verify_knows_the_model(calibrated, tiny, tmp_path):
    assert verify(calibrated, str(tiny)).ok
    other = save_tiny(tmp_path / "other")
    with edited_weights(other) as weights:
        weights["model.layers.1.self_attn.k_proj.weight"][-1, -1] += 0.5
    assert "made for other weights" in verify(calibrated, str(other)).problems[0]
    (other / "model.safetensors").unlink()
    assert verify(calibrated, str(other)).ok, "with the config alone nothing tells them apart"
    edit_config(other, rope_theta=5.0)
    assert "made for another model" in verify(calibrated, str(other)).problems[0]


# ---- what the command says


def test_verify_says_whose_rotations_in_one_verdict_and_checks_only_what_holds(
    inside, made, tmp_path
):
    """Of the model itself; then of one of the same shape with other weights."""
    shutil.copytree(made, inside.folder / "plain")
    other = shutil.copytree(DEMO, tmp_path / "other")
    with edited_weights(other) as weights:
        for tensor in weights.values():
            tensor.neg_()
    shown = succeeded(inside("verify", "plain", "--model", "demo"))
    assert "the weights of demo" in shown.stdout.splitlines()[-1]
    wrong = inside("verify", "plain", "--model", other)
    assert wrong.returncode == 1
    assert "Problem: made for other weights than" in wrong.stdout
    assert "the weights" not in wrong.stdout.splitlines()[-1], "which differ"
    error, hint = wrong.stderr.splitlines()
    assert "plain is sound, but for another model: made for other weights than" in error
    assert hint == "Hint: check it with its own model: rotationzoo verify plain --model demo"
    shown = json.loads(inside("verify", "plain", "--model", "demo", "--json").stdout)
    listed = inside("verify", "plain", "--model", "demo").stdout.splitlines()[-1]
    assert listed == f"Checked: {', '.join(shown['checked'])}"


def test_an_export_is_no_artifact_and_is_called_by_its_name(inside, made):
    assert inside("export", made, "--to", "sglang", "--pooled", "-o", "exported").returncode == 0
    says = only_error(inside("verify", "exported"))
    assert "exported holds files for an engine, which export wrote, and is not an artifact" in says
