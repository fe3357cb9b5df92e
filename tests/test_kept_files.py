"""What an earlier version wrote still loads, verifies, evaluates, exports and is listed."""

import json

import pytest
from support.places import ROOT

from rotationzoo import Artifact, evaluate
from rotationzoo.checks.verify import verify
from rotationzoo.storage.files import digest
from rotationzoo.zoo import index

SCHEMA_1 = ROOT / "tests" / "kept" / "schema_1"
FOLDER, MODEL = SCHEMA_1 / "artifact", SCHEMA_1 / "model"


def test_an_artifact_of_schema_1_verifies_with_the_hash_of_its_recipe():
    artifact = Artifact.open(FOLDER)
    assert verify(artifact).problems == []
    assert artifact.recipe.hash == artifact.manifest.recipe_sha256
    assert not artifact.recipe.equalize
    assert not artifact.rotations.equalized


def test_an_artifact_of_schema_1_evaluates():
    options = dict(tokens=512, length=128, device="cpu", dtype="float32", queries=4)
    report = evaluate(str(MODEL), FOLDER, windows=[(8, 16)], **options)
    arms = report["arms"]
    assert arms["artifact"]["perplexity_increase"] != arms["identity"]["perplexity_increase"]
    assert not any("other weights" in note for note in report["notes"])


@pytest.mark.parametrize("engine", ["sglang", "onnx"])
def test_an_artifact_of_schema_1_exports(engine, inside):
    done = inside("export", FOLDER, "--to", engine, "--output", "exported", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads((inside.folder / "exported" / "export.json").read_text())
    assert content["artifact"] == Artifact.open(FOLDER).identity


def test_an_index_entry_of_schema_1_lists_its_files():
    text = (SCHEMA_1 / "zoo_index.json").read_text()
    listed = index.parse(text, "the kept index")
    assert listed.text() == text
    (entry,) = listed.entries
    assert entry.recipe_sha256 == Artifact.open(FOLDER).recipe.hash
    for name in ("rotations.safetensors", "statistics.safetensors", "manifest.json"):
        assert entry.files[name].sha256 == digest((FOLDER / name).read_bytes())
