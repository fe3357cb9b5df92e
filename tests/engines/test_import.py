"""Files that others made, written here by code of our own after their tools, and what is wrong with
them found and named."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from scipy.linalg import hadamard as sylvester
from support import engine_readers as engines
from support.engine_artifacts import AGREED, OSCAR, base_for, exported
from support.models import save_tiny
from support.oscar_files import DIM, KEY, LAYERS, MOMENTS, VALUE, published, query_moment, v1

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.engines.base import Options
from rotationzoo.engines.export import export
from rotationzoo.engines.formats.oscar_lock import markers
from rotationzoo.engines.formats.oscar_pt_reader import read_pt
from rotationzoo.engines.import_ import Import, import_
from rotationzoo.engines.payload import Request
from rotationzoo.engines.rope_signature import pair_contrast
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.job import Evaluation, evaluate
from rotationzoo.linalg import compositions
from rotationzoo.recipe import PRESETS, Data
from rotationzoo.zoo.push import prepare

# ---- version 1


def test_a_published_pair_comes_back(pair, tmp_path):
    artifact = pair.read()
    assert verify(artifact).ok, verify(artifact).problems
    assert artifact.content["recipe"]["name"] == "oscar-v1"
    (note,) = artifact.content["imported"]["notes"]
    assert note == "the files do not say clip ratios or windows; assumed are 0.96/0.92 and 64/256"
    assert not artifact.bound
    assert (
        artifact.content["imported"]["files"]["key"]["size"] == (pair.folder / KEY).stat().st_size
    )
    tensors, statistics = artifact.rotation_tensors(), artifact.statistics_tensors()
    for i in range(LAYERS):
        for side, kind in (("key", "query.second_moment"), ("value", "value.key_energy_moment")):
            entry = getattr(pair, side)["layers"][i]
            assert torch.equal(tensors[f"layers.{i}.{side}.rotation"][0], entry["rotation"])
            assert torch.equal(tensors[f"layers.{i}.{side}.eigenvalues"][0], entry["eigenvalues"])
            moment = statistics[f"layers.{i}.{kind}"][0]
            assert (moment - MOMENTS[side][i]).norm() < 1e-6 * MOMENTS[side][
                i
            ].norm()  # measured 2e-7
            recomposed = recompose(moment, entry["rotation"])
            assert (recomposed - entry["rotation"]).abs().max() < 1e-5  # measured 1e-6
    assert (
        pair_contrast(
            torch.cat([statistics[f"layers.{i}.query.second_moment"] for i in range(LAYERS)])
        )
        < 0.2
    )
    assert (
        pair_contrast(
            torch.cat([statistics[f"layers.{i}.value.key_energy_moment"] for i in range(LAYERS)])
        )
        > 0.8
    )

    done = export(artifact, Request("sglang", tmp_path / "again"))
    for name, before in ((KEY, pair.key), (VALUE, pair.value)):
        after = torch.load(done.path / name, weights_only=True)
        assert list(after) == list(before)
        assert [type(value) for value in after.values()] == [
            type(value) for value in before.values()
        ]
        assert {name: after[name] for name in after if name != "layers"} == {
            n: before[n] for n in before if n != "layers"
        }
        assert list(after["layers"]) == list(before["layers"])
        for i, entry in before["layers"].items():
            assert list(after["layers"][i]) == list(entry)
            assert all(
                torch.equal(torch.as_tensor(after["layers"][i][n]), torch.as_tensor(entry[n]))
                for n in entry
            )


def recompose(moment: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """U H P of a moment, with the signs of the eigenvectors in a given rotation."""
    given = compositions.recover_basis(matrix, "r_h_pbr", len(matrix))
    _, basis = compositions.eigenbasis(moment)
    return compositions.compose(basis * (basis * given).sum(0).sign(), "r_h_pbr", len(matrix))


def test_eigenvalues_are_optional(pair):
    for side in (pair.key, pair.value):
        for entry in side["layers"].values():
            del entry["eigenvalues"]
    artifact = pair.read()
    assert verify(artifact).ok
    assert artifact.statistics_tensors() is None
    assert any("no eigenvalues" in note for note in artifact.content["imported"]["notes"])


def test_a_fork_whose_eigenvectors_descend(pair):
    """It claims the published name; the order of its eigenvalues tells."""
    pair.key, pair.value = (
        v1("key", "qqt_r_h_pbr", descending=True),
        v1("value", "sst_r_h_pbr", descending=True),
    )
    artifact = pair.read()
    notes = artifact.content["imported"]["notes"]
    assert artifact.content["recipe"]["composition"] == "rdesc_h_br"
    assert sum("descending order" in note for note in notes) == 2
    assert verify(artifact).ok
    moment = artifact.statistics_tensors()["layers.0.query.second_moment"][0]
    assert (moment - MOMENTS["key"][0]).norm() < 1e-6 * moment.norm()


def test_transposed_matrices_are_recognised(pair):
    for side in (pair.key, pair.value):
        for entry in side["layers"].values():
            entry["rotation"] = entry["rotation"].T.contiguous()
    assert "transposed: R is its M^T (add --transposed" in pair.refused()
    artifact = pair.read(transposed=True)
    expected, _ = published(MOMENTS["key"][0])
    assert torch.equal(artifact.rotation_tensors()["layers.0.key.rotation"][0], expected)


# ---- what is broken or ambiguous


def broken(name: str, pair) -> tuple[str, ...]:
    """Break a pair; the file names if they are part of it."""
    key, value = pair.key["layers"], pair.value["layers"]
    if name == "swapped by name":
        return VALUE, KEY
    if name == "swapped in content":
        pair.key, pair.value = v1("value", "qqt_r_h_pbr"), v1("key", "sst_r_h_pbr")
    elif name == "layer missing on one side":
        del value[5]
    elif name == "layer missing on both":
        del key[5], value[5]
    elif name == "not orthogonal":
        key[3]["rotation"] = key[3]["rotation"] * 1.01
    elif name == "not finite":
        value[3]["rotation"][0, 0] = float("nan")
    elif name == "identity":
        key[0]["rotation"] = torch.eye(DIM)
    elif name == "hadamard":
        value[8]["rotation"] = (
            torch.from_numpy(sylvester(DIM)).float()[:, torch.randperm(DIM)] / DIM**0.5
        )
    elif name == "the same matrices":
        pair.value = {**pair.key, "objective": "sst_r_h_pbr"}
    elif name == "eigenvalues in no order":
        key[2]["eigenvalues"] = key[2]["eigenvalues"][
            torch.randperm(DIM, generator=torch.Generator().manual_seed(0))
        ]
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
        pair.key["calibration"], pair.value["calibration"] = (
            {"generation_id": "a"},
            {"generation_id": "b"},
        )
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
        artifact.rotation_tensors()["layers.1.key.rotation"][0], published(MOMENTS["key"][1])[0]
    )


def slow_directions(dim: int, seed: int, strength: float) -> torch.Tensor:
    """A query moment whose strongest directions turn too slowly for RoPE to balance their pairs, as
    few positions leave it."""
    generator = torch.Generator().manual_seed(seed)
    moment = query_moment(dim, seed)
    basis, _ = torch.linalg.qr(torch.randn(dim, 24, generator=generator, dtype=torch.float64))
    return moment + strength * torch.linalg.eigvalsh(moment)[-1] * basis @ basis.mT


@pytest.mark.parametrize("strength", [0.8, 1.0, 1.3, 2.0])
def test_a_stated_composition_is_believed_although_the_reverse_order_shows_the_mark_more(
    pair, strength
):
    """Four of six published pairs have a contrast of .38 to .54, and less with their eigenvalues in
    reverse."""
    for i, entry in pair.key["layers"].items():
        entry["rotation"], entry["eigenvalues"] = published(slow_directions(DIM, i, strength))
    artifact = pair.read()
    assert artifact.content["recipe"]["name"] == "oscar-v1"
    assert len(artifact.content["imported"]["notes"]) == 1, (
        "nothing but the clip ratios, which no file says"
    )
    moments = [
        artifact.statistics_tensors()[f"layers.{i}.query.second_moment"] for i in range(LAYERS)
    ]
    expected = slow_directions(DIM, 0, strength)
    assert (moments[0][0] - expected).norm() < 1e-6 * expected.norm()
    reversed_moments = []
    for i in range(LAYERS):
        basis = compositions.recover_basis(pair.key["layers"][i]["rotation"], "r_h_pbr", DIM)
        weights = pair.key["layers"][i]["eigenvalues"].double().flip(0)
        reversed_moments.append((basis @ torch.diag(weights) @ basis.mT)[None])
    contrast, in_reverse = (
        pair_contrast(torch.cat(moments)),
        pair_contrast(torch.cat(reversed_moments)),
    )
    assert contrast > 0.35, "where the mark alone would not do"
    assert in_reverse < 0.35, "which was taken for another composition"


@pytest.mark.parametrize("said", ["qqt_r_h", "qqt_br", "qqt_plain", "qqt_h_r_pbr"])
def test_a_real_contradiction_is_still_told(pair, said):
    """The matrices are U H P, and the files say that they are something else."""
    pair.key["objective"], pair.value["objective"] = said, said.replace("qqt", "sst")
    artifact = pair.read(f"k_rotation_{said}.pt", f"v_rotation_{said.replace('qqt', 'sst')}.pt")
    composition = said.removeprefix("qqt_")
    note = f"the files say {composition}, and the matrices are of another composition"
    assert note in artifact.content["imported"]["notes"]
    assert artifact.statistics_tensors() is None, "they would be those of other vectors"


def test_layers_that_share_one_matrix(tmp_path):
    """Published Hadamard pairs hold one matrix for all layers, which safetensors would not
    write."""
    matrix = (torch.from_numpy(sylvester(DIM)).double() / DIM**0.5).float()
    ones = torch.ones(DIM)
    folder = tmp_path / "pair"
    folder.mkdir()
    for letter in "kv":
        layers = {
            i: {"layer_id": i, "rotation": matrix, "eigenvalues": ones} for i in range(3, 40, 4)
        }
        content = {
            "format_version": 1,
            "objective": "hadamard",
            "source_grouping": "layer",
            "layers": layers,
        }
        torch.save(content, folder / f"{letter}_rotation.pt")
    assert (folder / "k_rotation.pt").stat().st_size < 2 * matrix.nbytes + 8192, (
        "one matrix in the file"
    )
    artifact = import_(Import([folder], tmp_path / "imported"))
    assert verify(artifact).ok, verify(artifact).problems
    assert artifact.content["recipe"]["name"] == "hadamard"
    tensors = artifact.rotation_tensors()
    for i in range(3, 40, 4):
        assert torch.equal(tensors[f"layers.{i}.key.rotation"][0], matrix)
        assert torch.equal(tensors[f"layers.{i}.value.rotation"][0], matrix)


def test_half_precision_is_kept_without_statistics(pair):
    for side in (pair.key, pair.value):
        for entry in side["layers"].values():
            entry["rotation"] = entry["rotation"].bfloat16()
    artifact = pair.read()
    assert verify(artifact).ok, verify(artifact).problems
    assert artifact.statistics_tensors() is None
    assert any("off orthogonality" in note for note in artifact.content["imported"]["notes"])


@pytest.mark.parametrize("what", ["swapped", "transposed"])
def test_matrices_tell_where_files_say_nothing(pair, what):
    """Bare tables without a word of their composition."""
    if what == "swapped":
        pair.key, pair.value = pair.value, pair.key
    for side in (pair.key, pair.value):
        for entry in side["layers"].values():
            entry["rotation"] = (
                entry["rotation"].T.contiguous() if what == "transposed" else entry["rotation"]
            )
            del entry["eigenvalues"]
        side["objective"] = "unheard of"
    words = {
        "swapped": "keys and values are swapped",
        "transposed": "holds its matrices transposed",
    }
    assert words[what] in pair.refused("k_rotation.pt", "v_rotation.pt")


def test_a_pooled_centered_pair_can_be_pooled_again(made, tmp_path):
    artifact = made(recipe=OSCAR.model_copy(update={"center_keys": True}), head_dim=32)
    back = import_(Import([exported("sglang", artifact, tmp_path).path], tmp_path / "back"))
    shared = export(back, Request("sglang", tmp_path / "shared", pooled=True))
    content = torch.load(shared.path / "k_rotation_oscar2_center.pt")
    assert content["layers"][0]["k_mean"].shape == (2, 32)
    assert content["calibration"]["pooling"] == "layer"
    again = import_(Import([shared.path], tmp_path / "again"))
    assert again.rotation_tensors()["layers.0.key.rotation"].shape == (1, 32, 32)
    assert verify(again).ok, verify(again).problems


def test_the_group_size_travels_with_the_files(made, tmp_path):
    recipe = OSCAR.model_copy(
        update={"composition": "r_pbr_hblock", "group_size": 16, "sink": 8, "recent": 16}
    )
    artifact = made(recipe=recipe, head_dim=32)
    done = export(artifact, Request("sglang", tmp_path / "out", clip=(0.8, 0.7), windows=(8, 16)))
    back = import_(Import([done.path], tmp_path / "back"))
    found = back.content["recipe"]
    assert [found[name] for name in ("group_size", "key_clip", "value_clip", "sink", "recent")] == [
        16,
        0.8,
        0.7,
        8,
        16,
    ]
    moment = artifact.statistics_tensors()["layers.1.query.second_moment"]
    assert (
        back.statistics_tensors()["layers.1.query.second_moment"] - moment
    ).norm() < 1e-5 * moment.norm()
    for name in done.files:
        content = torch.load(done.path / name)
        del content["calibration"]
        torch.save(content, done.path / name)
    unknown = import_(Import([done.path], tmp_path / "unknown"))
    assert unknown.statistics_tensors() is None
    assert any("--group-size names it" in note for note in unknown.content["imported"]["notes"])
    with pytest.raises(RotationZooError, match="do not divide"):
        import_(Import([done.path], tmp_path / "odd", group_size=33))


def test_nothing_that_is_no_artifact_is_replaced(pair, tmp_path):
    folder = pair.write()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work").write_text("")
    (tmp_path / "file").write_text("")
    for place in ("mine", "file", "pair"):
        for restart in (False, True):
            with pytest.raises(RotationZooError, match="exists and is no artifact"):
                import_(Import([folder], tmp_path / place, restart=restart))
    assert (tmp_path / "mine" / "work").exists()
    assert (folder / KEY).exists()
    with pytest.raises(UsageError):
        import_(Import([folder], Path(".")))


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "swapped by name": f"{KEY} is named as keys and says that it holds values",
        "swapped in content": "keys and values are swapped: v_rotation_sst_r_h_pbr.pt bears the mark of RoPE",
        "layer missing on one side": "v_rotation_sst_r_h_pbr.pt has no layer 5",
        "layer missing on both": "may lack layers after layer 4",
        "not orthogonal": "layer 3 of k_rotation_qqt_r_h_pbr.pt is no orthogonal matrix",
        "not finite": "layer 3 of v_rotation_sst_r_h_pbr.pt is not finite",
        "identity": "holds the identity matrix in layer 0 under the name of a calibrated one",
        "hadamard": "holds a Hadamard matrix in layer 8 under the name of a calibrated one",
        "the same matrices": "hold the same matrices",
        "eigenvalues in no order": "eigenvalues of layer 2 in k_rotation_qqt_r_h_pbr.pt are in no order",
        "eigenvalues of a number": "the eigenvalues of layer 2 in k_rotation_qqt_r_h_pbr.pt is no table of real numbers",
        "eigenvalues below zero": "negative eigenvalues",
        "complex": "the rotation of layer 2 in k_rotation_qqt_r_h_pbr.pt is no table of real numbers",
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
    folder = pair.write()
    pair_id, pending, _ = markers(folder / KEY, folder / VALUE)
    assert (
        pair_id
        == hashlib.sha256(
            f"K={(folder / KEY).resolve()}\0V={(folder / VALUE).resolve()}".encode()
        ).hexdigest()[:16]
    )
    pending.write_text("{}")
    with pytest.raises(RotationZooError, match="stopped writing half-way"):
        import_(Import([folder], tmp_path / "imported"))
    pending.rename(folder / ".oscar_0123456789abcdef.pending.json")
    import_(Import([folder], tmp_path / "of another pair"))
    (folder / "k_rotation_perhead.pt").write_bytes((folder / KEY).read_bytes())
    with pytest.raises(RotationZooError, match="holds several pairs"):
        import_(Import([folder], tmp_path / "imported"))
    assert (
        import_(Import([folder / VALUE, folder / KEY], tmp_path / "imported")).content["imported"][
            "format"
        ]
        == "V1"
    )
    before = (tmp_path / "imported" / "manifest.json").stat().st_ino
    import_(Import([folder / KEY, folder / VALUE], tmp_path / "imported"))
    assert (tmp_path / "imported" / "manifest.json").stat().st_ino == before, (
        "the same import is not done twice"
    )
    with pytest.raises(RotationZooError, match="holds other work"):
        import_(Import([folder / VALUE, folder / KEY], tmp_path / "imported", clip=(1.0, 1.0)))
    with pytest.raises(RotationZooError, match="there is no file for the values"):
        import_(Import([folder / KEY], tmp_path / "two"))


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
    assert "the identity matrix in layer 0 under the name of a calibrated one" in pair.refused()
    artifact = pair.read("k_rotation.pt", "v_rotation.pt")
    assert artifact.content["recipe"]["composition"] == "identity"
    assert verify(artifact).ok, verify(artifact).problems


# ---- other formats


def test_one_rotation_per_head_of_the_published_fitter(tmp_path):
    """K^T K, eigenvectors descending, times H; no eigenvalues, no permutation."""
    folder = tmp_path / "perhead"
    folder.mkdir()
    for letter, side in (("k", "key"), ("v", "value")):
        layers = {}
        for i in range(LAYERS):
            both = torch.stack([MOMENTS[side][i], MOMENTS[side][(i + 1) % LAYERS]])
            _, vectors = torch.linalg.eigh(both)
            matrix = vectors.flip(-1) @ torch.from_numpy(sylvester(DIM)).double() / DIM**0.5
            layers[i] = {"layer_id": i, "rotation": matrix.float()}
        content = {
            "format_version": 2,
            "objective": "cov_eig_hadamard_perhead",
            "layers": layers,
        }
        torch.save(content, folder / f"{letter}_perhead.pt")
    artifact = import_(Import([folder], tmp_path / "imported"))
    assert verify(artifact).ok
    recipe = artifact.content["recipe"]
    assert (recipe["composition"], recipe["pooling"], recipe["key_statistic"]) == (
        "rdesc_h",
        "head",
        "key",
    )
    assert artifact.rotation_tensors()["layers.0.key.rotation"].shape == (2, DIM, DIM)
    assert artifact.content["imported"]["format"] == "V2"
    with pytest.raises(RotationZooError, match="has no statistics"):
        export(artifact, Request("sglang", tmp_path / "out", pooled=True))
    done = export(artifact, Request("sglang", tmp_path / "out"))
    content = torch.load(done.path / "k_rotation_perhead.pt")
    assert content["objective"] == "cov_eig_hadamard_perhead"
    assert list(content["layers"][0]) == ["layer_id", "rotation"]


@pytest.mark.parametrize("shape", ["bare", "flat", "stacked", "names"])
def test_tables_that_only_vllm_reads(pair, shape):
    for side in (pair.key, pair.value):
        matrices = {i: entry["rotation"] for i, entry in side.pop("layers").items()}
        side.clear()
        if shape == "bare":
            side["layers"] = matrices
        elif shape == "flat":
            side.update(matrices)
        elif shape == "names":
            side.update({f"layer_{i}": matrix for i, matrix in matrices.items()})
        else:
            side["stack"] = torch.stack(list(matrices.values()))
    if shape == "stacked":
        pair.key, pair.value = pair.key["stack"], pair.value["stack"]
    artifact = pair.read()
    assert artifact.content["recipe"]["composition"] == "given", "nothing says what they are"
    assert verify(artifact).ok
    expected, _ = published(MOMENTS["value"][4])
    assert torch.equal(artifact.rotation_tensors()["layers.4.value.rotation"][0], expected)


def test_mlx_files_are_transposed_back(tmp_path):
    """As mlx-lm writes them: M with x @ M^T, and no word of the composition."""
    folder = tmp_path / "mlx"
    folder.mkdir()
    for name, side in (("k_rotation", "key"), ("v_rotation", "value")):
        tensors = {
            f"layer_{i}": published(MOMENTS[side][i])[0].T.contiguous() for i in range(LAYERS)
        }
        save_file(tensors, folder / f"{name}.safetensors")
    artifact = import_(Import([folder], tmp_path / "imported"))
    assert torch.equal(
        artifact.rotation_tensors()["layers.2.key.rotation"][0], published(MOMENTS["key"][2])[0]
    )
    save_file({"rotation": torch.eye(DIM)}, folder / "k_rotation.safetensors")
    with pytest.raises(RotationZooError, match="one matrix for all layers"):
        import_(Import([folder], tmp_path / "other"))


@pytest.mark.parametrize("engine", ["sglang", "vllm", "mlx", "llama.cpp"])
@pytest.mark.parametrize("centered", [False, True])
def test_what_export_writes_import_reads(engine, centered, made, tmp_path):
    recipe = OSCAR.model_copy(update={"center_keys": centered})
    artifact = made(recipe=recipe, head_dim=32)
    changes = {"uncentered": True} if centered and engine != "sglang" else {}
    done = exported(engine, artifact, tmp_path, **changes)
    files = [next(done.path.glob("*.gguf"))] if engine == "llama.cpp" else [done.path]
    back = import_(Import(files, tmp_path / "back"))
    assert verify(back).ok, verify(back).problems
    again = export(
        back,
        Request(
            engine,
            tmp_path / "again",
            options=Options(base_for(artifact, tmp_path)),
            **AGREED[engine],
        ),
    )
    for name in done.files:
        if name.endswith(".pt"):
            one, two = read_pt(done.path / name), read_pt(again.path / name)
            for i, matrix in one.content.rotation.items():
                assert torch.equal(matrix, two.content.rotation[i])
                assert not one.content.mean or torch.equal(one.content.mean[i], two.content.mean[i])
            assert one.calibration == two.calibration, "what was known of the calibration is kept"
        elif name.endswith(".safetensors"):
            assert (done.path / name).read_bytes() == (again.path / name).read_bytes()
        elif name.endswith(".gguf"):
            for rows in (torch.randn(1, 4, 32).numpy(),):
                first, second = (
                    engines.read_llama(folder, {}, 1)("key", 3, rows)
                    for folder in (done.path, again.path)
                )
                assert (first == second).all()
    assert back.content["recipe"]["composition"] == "r_h_pbr"


# ---- bound to a model


@pytest.fixture
def of_tiny(tiny, tmp_path):
    """A pair that fits the tiny model, and its artifact."""
    recipe = PRESETS["oscar"].model_copy(
        update={"data": Data(tokens=512, length=256), "pooling": "layer"}
    )
    artifact = calibrate(Job(str(tiny), recipe, tmp_path / "own", device="cpu"))
    return export(artifact, Request("sglang", tmp_path / "files")).path, artifact


def test_bound_to_the_model_that_the_user_names(tiny, of_tiny, tmp_path):
    folder, own = of_tiny
    artifact = import_(Import([folder], tmp_path / "bound", model=str(tiny)))
    assert artifact.bound
    assert artifact.content["geometry"] == own.content["geometry"]
    assert artifact.rotation_tensors()["layers.0.key.clip"].shape == (2,)
    assert verify(artifact, str(tiny)).ok, verify(artifact, str(tiny)).problems
    for name, tensor in own.rotation_tensors().items():
        assert torch.equal(artifact.rotation_tensors()[name], tensor), name
    job = Evaluation(
        str(tiny),
        [own.folder, artifact.folder],
        Data(tokens=1024, length=512),
        device="cpu",
        queries=4,
    )
    arms = evaluate(job)["arms"]
    assert arms["bound"]["perplexity"] == arms["own"]["perplexity"]


def test_files_of_another_model(tiny, of_tiny, tmp_path, made):
    folder, _ = of_tiny
    with pytest.raises(RotationZooError, match="says that it was made for") as error:
        import_(Import([folder], tmp_path / "bound", model="demo"))
    assert "--model" in error.value.hint
    for name in ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"):
        content = torch.load(folder / name)
        del content["calibration"]
        torch.save(content, folder / name)
    with pytest.raises(
        RotationZooError, match=r"not for demo: they have no key rotation for layer 2"
    ):
        import_(Import([folder], tmp_path / "bound", model="demo"))
    for name in ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"):
        content = torch.load(folder / name)
        content["layers"][1]["rotation"] = (
            content["layers"][1]["rotation"].expand(3, -1, -1).clone()
        )
        del content["layers"][1]["eigenvalues"], content["layers"][0]["eigenvalues"]
        torch.save(content, folder / name)
    with pytest.raises(
        RotationZooError, match=r"layer 1 has 2 KV heads with keys of 16, the file \[3, 16, 16\]"
    ):
        import_(Import([folder], tmp_path / "bound", model=str(tiny)))


def test_unbound_artifacts_say_so(pair, tiny, tmp_path):
    artifact = pair.read()
    assert verify(artifact, str(tiny)).problems == [
        "bound to no model: nobody has said which one the imported files are for"
    ]
    with pytest.raises(RotationZooError, match="how many there are"):
        export(artifact, Request("onnx", tmp_path / "onnx"))
    with pytest.raises(RotationZooError, match="is bound to no model"):
        evaluate(
            Evaluation(str(tiny), [artifact.folder], Data(tokens=1024, length=512), device="cpu")
        )
    with pytest.raises(RotationZooError, match="nobody has said which model"):
        prepare(artifact, "some/zoo")


def test_the_model_itself_tells_whose_rotations_they_are(tiny, of_tiny, tmp_path, inside):
    """Same shapes, other weights: nothing in the files says it, what the model computes does."""
    folder, _ = of_tiny
    for name in ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"):
        content = torch.load(folder / name)
        del content["calibration"]
        torch.save(content, folder / name)
    twin = save_tiny(tmp_path / "twin")
    model = transformers.AutoModelForCausalLM.from_pretrained(twin)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(twin)
    for name, right in ((tiny, True), (twin, False)):
        artifact = import_(Import([folder], tmp_path / f"bound-{right}", model=str(name)))
        assert verify(artifact, str(name)).ok, "by its files alone"
        result = inside(
            "verify", artifact.folder, "--model", name, "--run", "--device", "cpu", "--json"
        )
        data = json.loads(result.stdout)
        assert data["ok"] is right
        assert (min(data["agreement"].values()) > 0.24) is right, data["agreement"]
    assert "not made of what" in data["problems"][0]
    assert inside("verify", artifact.folder, "--run").returncode == 2


def test_the_command(pair, inside):
    folder = pair.write()
    result = inside("import", folder, "--json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["layers"], data["recipe"], data["artifact"]) == (
        LAYERS,
        "oscar-v1",
        "rotations/pair-imported",
    )
    assert "bound to no model" in result.stderr
    card = (inside.folder / "rotations" / "pair-imported" / "README.md").read_text()
    assert KEY in card
    assert "imported" in card
    assert inside("verify", "rotations/pair-imported").returncode == 0
    assert inside("inspect", "rotations/pair-imported").returncode == 0
    assert "holds other work" in inside("import", folder, "--clip", "1").stderr
    assert inside("import", inside.folder / "none").stderr.startswith("Error: there is no file")
