"""The whole job through the library: what is known before a weight is read, and what it writes."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.jobs import RECIPE, SMALL, job
from support.recipes import QUICK
from support.tensors import stored_rotations, stored_statistics

from rotationzoo.artifact.layout import rotations_from
from rotationzoo.artifact.statistics_layout import statistics_from
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job, plan
from rotationzoo.checks.verify import verify
from rotationzoo.cli.inspect import summarize
from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Data, Recipe
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.writer import write_artifact


def test_the_files_keep_their_contract(calibrated):
    assert {p.name for p in calibrated.folder.iterdir()} == {
        "rotations.safetensors", "statistics.safetensors", "manifest.json", "README.md"
    }  # fmt: skip
    assert {p.name for p in calibrated.folder.parent.iterdir()} == {"out"}, (
        "no checkpoint or temporary folder is left"
    )
    rotations, statistics = stored_rotations(calibrated), stored_statistics(calibrated)
    manifest = calibrated.content
    assert manifest["schema"] == 1
    for layer in range(2):
        for side in ("key", "value"):
            assert rotations[f"layers.{layer}.{side}.rotation"].shape == (2, 16, 16)
            assert (rotations[f"layers.{layer}.{side}.eigenvalues"].diff() >= 0).all()
            ratio = 0.96 if side == "key" else 0.92
            assert rotations[f"layers.{layer}.{side}.clip"].tolist() == [ratio] * 2
            assert statistics[f"layers.{layer}.{side}.count"].item() == 8 * (256 - 64)
        for kind in ("query", "output"):
            assert statistics[f"layers.{layer}.{kind}.second_moment"].dtype == torch.float64
            assert statistics[f"layers.{layer}.{kind}.count"].item() == 2 * 8 * 256
    calibration = manifest["calibration"]
    described = [calibration[key] for key in ("source", "tokens", "rows")]
    assert described == ["bundled", 2048, 8]
    assert len(calibration["fingerprint"]) == len(manifest["model"]["weights_fingerprint"]) == 64
    read = Recipe.model_validate(manifest["recipe"])
    assert read.hash == manifest["recipe_sha256"] == RECIPE.hash
    assert calibrated.identity == manifest["files"]["rotations.safetensors"]["sha256"]
    card_text = (calibrated.folder / "README.md").read_text()
    assert card_text.startswith("---\nlibrary_name: rotationzoo")


@pytest.mark.parametrize("name", PRESETS)
def test_every_recipe_makes_a_sound_artifact(name, tiny, tmp_path):
    recipe = PRESETS[name].model_copy(update={"data": SMALL})
    artifact = calibrate(job(tiny, tmp_path, recipe))
    verification = verify(artifact, str(tiny))
    assert verification.ok, verification.problems
    assert verification.orthogonality_error < 1e-6  # measured 6e-8
    assert (artifact.statistics is None) == (name in ("hadamard", "identity", "random"))
    heads = 1 if recipe.pooling == "layer" else 2
    assert stored_rotations(artifact)["layers.0.key.rotation"].shape == (heads, 16, 16)
    assert len(summarize(artifact)) == 2


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("base", ["oscar", "hadamard"])
def test_a_recipe_that_centers_keeps_the_mean(base, side, tiny, tmp_path):
    recipe = PRESETS[base].model_copy(
        update={f"center_{side}s": True, "data": Data(tokens=512, length=256)}
    )
    artifact = calibrate(Job(str(tiny), recipe, tmp_path / "out", device="cpu"))
    assert verify(artifact).ok, verify(artifact).problems
    rotations, statistics = stored_rotations(artifact), stored_statistics(artifact)
    for layer in (0, 1):
        assert torch.equal(
            rotations[f"layers.{layer}.{side}.mean"],
            statistics[f"layers.{layer}.{side}.mean"].float(),
        )
    assert f"({side[0]} - mean) R_{side[0].upper()}" in (artifact.folder / "README.md").read_text()
    rotations[f"layers.1.{side}.mean"] += 1
    changed = write_artifact(
        artifact.folder,
        rotations_from(rotations),
        statistics_from(statistics),
        dict(artifact.content),
    )
    assert verify(changed).problems == [f"{side} mean not that of the statistics: layer 1"]


def test_the_composition_of_imported_files_cannot_be_calibrated(tiny, tmp_path):
    recipe = QUICK.model_copy(update={"composition": "given"})
    with pytest.raises(RotationZooError, match="stands for imported matrices"):
        calibrate(Job(str(tiny), recipe, tmp_path / "out", device="cpu"))


def test_random_rotations_differ_by_head_and_layer(tiny, tmp_path):
    rotations = stored_rotations(calibrate(job(tiny, tmp_path, PRESETS["random"])))
    by_head = [tensor for name, tensor in rotations.items() if name.endswith("rotation")]
    assert len({matrix.numpy().tobytes() for matrix in torch.cat(by_head)}) == 8


def test_the_plan_reads_only_the_config(tiny, tmp_path):
    (tmp_path / "model").mkdir()
    shutil.copy(tiny / "config.json", tmp_path / "model")
    planned = plan(job(tmp_path / "model", tmp_path))
    assert [(layer.kv_heads, layer.key_dim) for layer in planned.geometry] == [(2, 16)] * 2
    assert planned.weights_bytes > 0
    with pytest.raises(RotationZooError, match="tokenizer"):
        calibrate(job(tmp_path / "model", tmp_path))


def test_the_planned_sizes_are_those_that_come_out(calibrated, tiny, tmp_path):
    planned = plan(job(tiny, tmp_path)).artifact_bytes
    written = sum(file["size"] for file in calibrated.content["files"].values())
    assert planned <= written <= 1.5 * planned + 10_000  # headers and means besides


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("auto", 4)])
def test_a_plan_counts_weights_in_the_type_that_they_are_loaded_in(dtype, item, tiny, tmp_path):
    parameters = sum(t.numel() for t in load_file(tiny / "model.safetensors").values())
    # Spread over devices, `auto` is the checkpoint's own type, here float32.
    options = {"device_map": "auto"} if dtype == "auto" else {}
    size, float32_size = (
        plan(job(tiny, tmp_path, RECIPE, dtype=name, **options)).peak_memory_bytes
        for name in (dtype, "float32")
    )
    if item == 2:
        assert float32_size - size >= 2 * parameters
    else:
        assert abs(size / float32_size - 1) < 1e-3
