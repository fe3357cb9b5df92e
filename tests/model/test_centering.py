"""Keys are stored without their mean only where attention ignores it: tried on every model,
whatever it is called."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import architectures
from support.architectures import families
from support.command_line import edited_manifest
from support.models import save_family
from support.recipes import QUICK
from support.tensors import stored_rotations

from rotationzoo.artifact.reductions import Request
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job, plan
from rotationzoo.checks.verify import verify
from rotationzoo.engines.export import export
from rotationzoo.engines.import_ import import_
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import geometry_from_json, geometry_json
from rotationzoo.model import geometry
from rotationzoo.model.capture import Attention
from rotationzoo.recipe import Data, Recipe
from rotationzoo.settings import Import
from rotationzoo.zoo import regenerate
from rotationzoo.zoo.index import Entry, Index

MOVED = {"gemma2": [0, 1, 2, 3], "gpt_oss": [0, 1, 2, 3], "mimo_v2_flash": [0, 1, 2]}
LOOKED_AT = [*MOVED, "qwen3"]
WINDOWS = {"sink": 8, "recent": 8}
CENTERED = QUICK.model_copy(update={"data": Data(tokens=512, length=128), **WINDOWS})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return cache(lambda name: save_family(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def centered(folders, tmp_path_factory) -> Artifact:
    """An artifact of Qwen3, whose attention ignores the mean."""
    folder = tmp_path_factory.mktemp("centered") / "qwen3"
    return calibrate(Job(str(folders("qwen3")), CENTERED, folder))


def test_attention_that_cannot_be_tried_needs_its_mean():
    model = architectures.build("qwen3")
    module = model.model.layers[0].self_attn
    tensors = [torch.zeros(1, heads, 8, 16) for heads in (4, 2, 2)]

    def broken(*_, **__):
        raise KeyError

    assert not geometry.ignores_shift(Attention(torch.nn.Linear(2, 2), broken, None, {}), *tensors)
    # An attention function that is in no modeling file.
    assert geometry.ignores_shift(Attention(torch.nn.Linear(2, 2), _attend, None, {}), *tensors)
    eager = Attention(module, broken, None, {"scaling": 0.25})
    assert geometry.ignores_shift(eager, *tensors), "eager is there"


def _attend(_, query, key, value, mask, **__):
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )
    return out.transpose(1, 2), None


def notes_on_means(made) -> list[str]:
    """The notes of an artifact, without the one on the loss of random weights."""
    return [note for note in made.content["notes"] if "worse than chance" not in note]


@families(LOOKED_AT)
def test_keys_keep_their_mean_if_attention_needs_it(name, folders, tmp_path):
    job = Job(str(folders(name)), CENTERED, tmp_path / "out")
    planned = plan(job)
    assert planned.job.recipe.center_keys == (name not in MOVED)
    made = calibrate(job)
    means = [tensor for tensor in stored_rotations(made) if tensor.endswith("key.mean")]
    card = (made.folder / "README.md").read_text(encoding="utf-8")
    assert verify(made).ok
    assert bool(means) == made.content["recipe"]["center_keys"] == (name not in MOVED)
    notes = notes_on_means(made)
    assert len(notes) == (name in MOVED)
    for note in notes:
        assert note.startswith("keys keep their mean, although the recipe oscar centers them: ")
        assert f"({len(MOVED[name])} layers, 0 the first)" in note
        assert note in card
        assert planned.notes == (note,)
    assert calibrate(job).identity == made.identity, "the same job"


@families(["gemma2", "gpt_oss"])
def test_files_with_a_mean_are_not_imported_for_such_a_model(name, centered, tmp_path):
    """Everything fits except the attention."""
    files = export(centered, Request("sglang", tmp_path / "files"))
    pair = [files.path / file for file in files.files if file.endswith(".pt")]
    for path in pair:  # published files do not name their model
        content = torch.load(path, weights_only=True)
        del content["calibration"]
        torch.save(content, path)
    model = str(save_family(name, tmp_path / name, weights=False))
    with pytest.raises(RotationZooError, match=r"centers keys, which .*: attention depends"):
        import_(Import(pair, tmp_path / "imported", model=model))


def planted(artifact: Artifact, folder: Path, invariant: bool) -> Artifact:
    """A copy with a changed `shift_invariant` in its geometry."""
    shutil.copytree(artifact.folder, folder)
    with edited_manifest(folder) as manifest:
        layers = geometry_from_json(manifest["geometry"])
        layers = [replace(layer, shift_invariant=invariant) for layer in layers]
        manifest["geometry"] = geometry_json(layers)
    return Artifact.open(folder)


def test_an_artifact_with_a_mean_that_does_not_cancel_is_not_exported(centered, tmp_path):
    wrong, said = planted(centered, tmp_path / "wrong", False), "keys are stored without their mean"
    assert said in " ".join(verify(wrong).problems)
    with pytest.raises(RotationZooError, match=f"is not exported: {said}"):
        export(wrong, Request("sglang", tmp_path / "exported"))


def test_a_model_whose_keys_kept_their_mean_is_not_due_again():
    """The published recipe lacks `center_keys`, which the configured one has."""
    revision, model = "1" * 40, "someone/model"
    asked = CENTERED.model_copy(update={"model": model})
    done = asked.model_copy(update={"center_keys": False})
    other = asked.model_copy(update={"key_clip": 0.9})
    about = {"model": model, "recipe": done.name, "created": "2026-01-01"}
    entry = Entry.model_construct(recipe_sha256=done.hash, model_revision=revision, **about)
    hub = SimpleNamespace(contents=lambda _: (revision, {}))

    def due(recipe: Recipe, *entries: Entry) -> str | None:
        found = regenerate._look_at(hub, Index.model_construct(entries=entries), Path("x"), recipe)
        return found and found.reason

    assert due(asked) == "nothing is published"
    assert due(asked, entry) is None
    assert due(other, entry) == "the recipe has changed"
