"""Files that others made, written here by code of our own after their tools, become artifacts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scipy.linalg import hadamard as sylvester
from support import engine_artifacts
from support.engine_artifacts import OSCAR, exported
from support.jobs import calibrate_short
from support.oscar_files import DIM, KEY, LAYERS, VALUE, model_of, moments, published, refused, v1
from support.published import ok
from support.reports import evaluate
from support.tensors import stored_rotations

from rotationzoo.artifact.reductions import Request
from rotationzoo.checks.verify import verify
from rotationzoo.engines.export import export
from rotationzoo.engines.formats.oscar_pt import read_pt
from rotationzoo.engines.import_ import import_
from rotationzoo.errors import UsageError
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.recipe import Data, Recipe
from rotationzoo.settings import Import

HADAMARD = torch.from_numpy(sylvester(DIM)).double() / DIM**0.5


def test_a_published_pair_comes_back(pair, tmp_path):
    artifact = pair.read()
    assert verify(artifact).ok, verify(artifact).problems
    assert artifact.content["recipe"]["name"] == "imported"
    assert artifact.content["imported"]["objectives"]["key"] == "qqt_r_h_pbr"
    imported = artifact.content["imported"]
    (note,) = imported["notes"]
    assert note == "the files do not say clip ratios or windows; assumed are 0.96/0.92 and 64/256"
    assert imported["files"]["key"]["size"] == (pair.folder / KEY).stat().st_size
    tensors = stored_rotations(artifact)
    for i in range(LAYERS):
        for side in ("key", "value"):
            entry = getattr(pair, side)["layers"][i]
            assert torch.equal(tensors[f"layers.{i}.{side}.rotation"][0], entry["rotation"])
            assert torch.equal(tensors[f"layers.{i}.{side}.eigenvalues"][0], entry["eigenvalues"])
    done = export(artifact, Request("sglang", tmp_path / "again"))
    for name, before in ((KEY, pair.key), (VALUE, pair.value)):
        after = torch.load(done.path / name, weights_only=True)
        assert list(after) == list(before)
        assert list(map(type, after.values())) == list(map(type, before.values()))
        layers, expected = after.pop("layers"), before.pop("layers")
        assert after == before
        assert list(layers) == list(expected)
        for i, entry in expected.items():
            assert list(layers[i]) == list(entry)
            for key, value in entry.items():
                assert torch.equal(torch.as_tensor(layers[i][key]), torch.as_tensor(value))


@pytest.mark.parametrize("name", ["hadamard", "identity"])
def test_pairs_of_one_matrix_for_all_layers(pair, name):
    """As pairs without data are published. safetensors would not write a matrix that is shared."""
    matrix = (HADAMARD if name == "hadamard" else torch.eye(DIM)).float()
    for side, letter in ((pair.key, "k"), (pair.value, "v")):
        side["layers"] = {i: {"layer_id": i, "rotation": matrix} for i in range(LAYERS)}
        side["objective"] = name
        if name == "identity":
            side |= {"format_version": "identity-v1", "objective": f"identity-{letter}"}
    artifact = pair.read("k_rotation.pt", "v_rotation.pt")
    size = (pair.folder / "k_rotation.pt").stat().st_size
    assert size < 2 * matrix.nbytes + 8192, "one matrix in the file"
    assert verify(artifact).ok, verify(artifact).problems
    assert artifact.content["recipe"]["composition"] == name
    tensors = stored_rotations(artifact)
    for i in range(LAYERS):
        assert torch.equal(tensors[f"layers.{i}.key.rotation"][0], matrix)
        assert torch.equal(tensors[f"layers.{i}.value.rotation"][0], matrix)


def test_half_precision_is_kept(pair):
    for side in (pair.key, pair.value):
        for entry in side["layers"].values():
            entry["rotation"] = entry["rotation"].bfloat16()
    artifact = pair.read()
    assert verify(artifact).ok, verify(artifact).problems
    notes = artifact.content["imported"]["notes"]
    assert f"{KEY} is not float32; its matrices were converted" in notes


def test_the_group_size_travels_with_the_files(made, tmp_path):
    recipe = OSCAR.model_copy(
        update={"composition": "r_pbr_hblock", "group_size": 16, "sink": 8, "recent": 16}
    )
    artifact = made(recipe=recipe, head_dim=32)
    done = export(artifact, Request("sglang", tmp_path / "out", clip=(0.8, 0.7), windows=(8, 16)))
    model = engine_artifacts.model_of(artifact)
    back = import_(Import([done.path], tmp_path / "back", model))
    found = back.content["recipe"]
    names = ("group_size", "key_clip", "value_clip", "sink", "recent")
    assert [found[name] for name in names] == [16, 0.8, 0.7, 8, 16]
    for name in done.files:
        content = torch.load(done.path / name)
        del content["calibration"]
        torch.save(content, done.path / name)
    unknown = import_(Import([done.path], tmp_path / "unknown", model))
    assert unknown.content["recipe"]["group_size"] is None
    odd = Import([done.path], tmp_path / "odd", model, group_size=33)
    assert "do not divide" in refused(import_, odd)


def test_nothing_that_is_no_artifact_is_replaced(pair, tmp_path):
    folder = pair.write()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work").write_text("")
    (tmp_path / "file").write_text("")
    for place in ("mine", "file", "pair"):
        for restart in (False, True):
            job = Import([folder], tmp_path / place, "demo", restart=restart)
            assert "exists and is not an artifact" in refused(import_, job)
    assert (tmp_path / "mine" / "work").exists()
    assert (folder / KEY).exists()
    with pytest.raises(UsageError):
        import_(Import([folder], Path("."), "demo"))


def test_one_rotation_per_head_of_the_published_fitter(tmp_path):
    """K^T K, eigenvectors descending, times H; no eigenvalues, no permutation."""
    folder, objective = tmp_path / "perhead", "cov_eig_hadamard_perhead"
    folder.mkdir()
    for letter, side in (("k", "key"), ("v", "value")):
        layers = {}
        for i in range(LAYERS):
            both = torch.stack([moments(side)[i], moments(side)[(i + 1) % LAYERS]])
            _, vectors = torch.linalg.eigh(both)
            layers[i] = {"layer_id": i, "rotation": (vectors.flip(-1) @ HADAMARD).float()}
        content = {"format_version": 2, "objective": objective, "layers": layers}
        torch.save(content, folder / f"{letter}_perhead.pt")
    model = model_of(tmp_path / "model", heads=2)
    artifact = import_(Import([folder], tmp_path / "imported", model))
    assert verify(artifact).ok
    recipe = artifact.content["recipe"]
    assert [recipe[name] for name in ("composition", "pooling")] == ["given", "head"]
    assert stored_rotations(artifact)["layers.0.key.rotation"].shape == (2, DIM, DIM)
    assert artifact.content["imported"]["format"] == "V2"
    pooled = Request("sglang", tmp_path / "out", pooled=True)
    assert "has no statistics" in refused(export, artifact, pooled)
    done = export(artifact, Request("sglang", tmp_path / "out"))
    content = torch.load(done.path / "k_rotation_perhead.pt")
    assert content["objective"] == objective
    assert list(content["layers"][0]) == ["layer_id", "rotation"]


TABLES = {
    "bare": lambda matrices: {"layers": matrices},
    "flat": dict,
    "stacked": lambda matrices: torch.stack(list(matrices.values())),
    "names": lambda matrices: {f"layer_{i}": matrix for i, matrix in matrices.items()},
}


@pytest.mark.parametrize("shape", TABLES)
def test_tables_that_only_vllm_reads(pair, shape):
    for side in ("key", "value"):
        matrices = {i: entry["rotation"] for i, entry in getattr(pair, side)["layers"].items()}
        setattr(pair, side, TABLES[shape](matrices))
    artifact = pair.read()
    assert artifact.content["recipe"]["composition"] == "given", "nothing says what they are"
    assert verify(artifact).ok
    expected, _ = published(moments("value")[3])
    assert torch.equal(stored_rotations(artifact)["layers.3.value.rotation"][0], expected)


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ("sglang", {}),
        ("sglang", {"pooled": True}),
        ("vllm-oscar", {}),
        ("vllm-oscar", {"uncentered": True}),
    ],
)
@pytest.mark.parametrize("centered", [False, True])
def test_what_export_writes_import_reads(engine, changes, centered, made, tmp_path):
    recipe = OSCAR.model_copy(update={"center_keys": centered})
    artifact = made(recipe=recipe, head_dim=32)
    done = exported(engine, artifact, tmp_path, **changes)
    back = import_(Import([done.path], tmp_path / "back", engine_artifacts.model_of(artifact)))
    heads = 1 if engine == "vllm-oscar" or changes else 2
    assert stored_rotations(back)["layers.0.key.rotation"].shape == (heads, 32, 32)
    assert verify(back).ok, verify(back).problems
    again = export(back, Request(engine, tmp_path / "again"))
    for name in done.files:
        if name.endswith(".pt"):
            one, two = read_pt(done.path / name), read_pt(again.path / name)
            for i, matrix in one.content.rotation.items():
                assert torch.equal(matrix, two.content.rotation[i])
                assert not one.content.mean or torch.equal(one.content.mean[i], two.content.mean[i])
            assert one.calibration == two.calibration, "what was known of the calibration is kept"


def test_the_command(pair, inside):
    folder = pair.write()
    words = ["import", folder, "--model", model_of(inside.folder / "pair-model")]
    data = ok(inside(*words, "--json"))
    assert (data["layers"], data["recipe"]) == (LAYERS, "imported")
    assert data["artifact"] == "rotations/pair-model-imported"
    card = (inside.folder / "rotations" / "pair-model-imported" / "README.md").read_text()
    assert KEY in card
    assert "imported" in card
    assert inside("verify", "rotations/pair-model-imported").returncode == 0
    assert inside("inspect", "rotations/pair-model-imported").returncode == 0
    assert "holds the work of another job" in inside(*words, "--clip", "1").stderr
    missing = inside("import", inside.folder / "none", "--model", "demo").stderr
    assert missing.startswith("Error: there is no file")
    assert inside("import", folder).returncode == 2


def test_eigenvalues_in_another_order_are_kept(pair):
    pair.key = v1("key", "qqt_r_h_pbr", descending=True)
    artifact, given = pair.read(), pair.key["layers"][0]["eigenvalues"]
    assert torch.equal(stored_rotations(artifact)["layers.0.key.eigenvalues"][0], given)
    assert verify(artifact).ok


# ---- imported files and the model that the user says they are for


TEXT = Data(tokens=1024, length=512)


@pytest.fixture
def of_tiny(tiny, tmp_path):
    """A pair that fits the tiny model, and its artifact."""
    artifact = calibrate_short(tiny, tmp_path / "own", Recipe(pooling="layer"), tokens=1024)
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
    options = dict(device="cpu", tasks=TaskSettings(()))
    folders = [own.folder, artifact.folder]
    arms = evaluate(Evaluation(str(tiny), folders, TEXT, **options))["arms"]
    assert arms["bound"]["perplexity"] == arms["own"]["perplexity"]


def test_files_of_another_model(tiny, of_tiny, tmp_path, made):
    folder, _ = of_tiny

    def refuse(model) -> str:
        return refused(import_, Import([folder], tmp_path / "bound", model))

    assert "says that it was made for" in refuse("demo")
    for content in changed(folder):
        del content["calibration"]
    assert "not for demo: they have no key rotation for layer" in refuse("demo")
    for content in changed(folder):
        layers = content["layers"]
        layers[1]["rotation"] = layers[1]["rotation"].expand(3, -1, -1).clone()
        del layers[1]["eigenvalues"], layers[0]["eigenvalues"]
    said = "layer 1 has 2 KV heads with keys of 16, the file [3, 16, 16]"
    assert said in refuse(str(tiny))
