"""Imported files and the model that the user says they are for."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models import save_tiny
from support.oscar_files import KEY, VALUE
from support.reports import evaluate
from support.tensors import stored_rotations

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.engines.export import export
from rotationzoo.engines.import_ import Import, import_
from rotationzoo.engines.payload import Request
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.recipe import Data, Recipe

TEXT = Data(tokens=1024, length=512)


@pytest.fixture
def of_tiny(tiny, tmp_path):
    """A pair that fits the tiny model, and its artifact."""
    recipe = Recipe(data=Data(tokens=512, length=256), pooling="layer")
    artifact = calibrate(Job(str(tiny), recipe, tmp_path / "own", device="cpu"))
    return export(artifact, Request("sglang", tmp_path / "files")).path, artifact


def changed(folder: Path) -> Iterator[dict]:
    """The content of each file of a pair, which is written when the next one is asked for."""
    for path in (folder / KEY, folder / VALUE):
        content = torch.load(path)
        yield content
        torch.save(content, path)


def test_bound_to_the_model_that_the_user_names(tiny, of_tiny, tmp_path):
    folder, own = of_tiny
    artifact = import_(Import([folder], tmp_path / "bound", model=str(tiny)))
    assert artifact.content["geometry"] == own.content["geometry"]
    assert stored_rotations(artifact)["layers.0.key.clip"].shape == (2,)
    assert verify(artifact, str(tiny)).ok, verify(artifact, str(tiny)).problems
    for name, tensor in stored_rotations(own).items():
        assert torch.equal(stored_rotations(artifact)[name], tensor), name
    options = dict(device="cpu", queries=4, tasks=TaskSettings(()))
    folders = [own.folder, artifact.folder]
    arms = evaluate(Evaluation(str(tiny), folders, TEXT, **options))["arms"]
    assert arms["bound"]["perplexity"] == arms["own"]["perplexity"]


def test_files_of_another_model(tiny, of_tiny, tmp_path, made):
    folder, _ = of_tiny
    with pytest.raises(RotationZooError, match="says that it was made for") as error:
        import_(Import([folder], tmp_path / "bound", model="demo"))
    assert "--model" in error.value.hint
    for content in changed(folder):
        del content["calibration"]
    with pytest.raises(RotationZooError, match="not for demo: they have no key rotation for layer"):
        import_(Import([folder], tmp_path / "bound", model="demo"))
    for content in changed(folder):
        layers = content["layers"]
        layers[1]["rotation"] = layers[1]["rotation"].expand(3, -1, -1).clone()
        del layers[1]["eigenvalues"], layers[0]["eigenvalues"]
    said = r"layer 1 has 2 KV heads with keys of 16, the file \[3, 16, 16\]"
    with pytest.raises(RotationZooError, match=said):
        import_(Import([folder], tmp_path / "bound", model=str(tiny)))


def test_the_model_itself_tells_whose_rotations_they_are(tiny, of_tiny, tmp_path, inside):
    """Same shapes, other weights: nothing in the files says it, what the model computes does."""
    folder, _ = of_tiny
    for content in changed(folder):
        del content["calibration"]
    twin = save_tiny(tmp_path / "twin", seed=5)
    for name, right in ((tiny, True), (twin, False)):
        artifact = import_(Import([folder], tmp_path / f"bound-{right}", model=str(name)))
        assert verify(artifact, str(name)).ok, "by its files alone"
        words = ["--model", name, "--run", "--device", "cpu", "--json"]
        result = inside("verify", artifact.folder, *words)
        data = json.loads(result.stdout)
        assert data["ok"] is right
        assert (min(data["agreement"].values()) > 0.24) is right, data["agreement"]
    assert "not made of what" in data["problems"][0]
    assert f"is sound, but of another model: not made of what {twin} computes" in result.stderr
    assert result.stderr.endswith("import its files again with the model that they are for\n")
    assert inside("verify", artifact.folder, "--run").returncode == 2
