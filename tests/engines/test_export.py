"""Exports, read the way each engine reads them: exact attention without quantization, the engine's
own codes with it."""

import fcntl
import json
import logging
import multiprocessing
import re
import shutil
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import engine_readers as engines
from support.engine_artifacts import (
    AGREED,
    CENTERED,
    OSCAR,
    attend,
    base_for,
    exported,
    layers_of,
    matrices,
    rows_of,
)
from support.models import save_tiny
from support.places import ROOT

from rotationzoo.artifact.layout import rotations_from
from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.writer import write_artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.calibration.soundness import Verification
from rotationzoo.checks.verify import verify
from rotationzoo.codec import int2
from rotationzoo.engines import export as exporting
from rotationzoo.engines.base import Options
from rotationzoo.engines.export import ENGINES, export
from rotationzoo.engines.formats import oscar_pt, sglang
from rotationzoo.engines.payload import Request
from rotationzoo.engines.recognise import gather
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.hadamard import hadamard
from rotationzoo.recipe import PRESETS, Data, Recipe
from rotationzoo.storage import folders
from rotationzoo.storage.files import sha256


def check_engine(engine: str, artifact: Artifact, done, transpose: bool = False) -> None:
    """Attention through the export is exact, and rows are stored as the codec says."""
    pooled = bool(AGREED[engine].get("pooled"))
    recipe = artifact.recipe
    for layer in layers_of(artifact):
        rotate = engines.READ[engine](done.path, done.launch.environment, layer.kv_heads)
        k, v, q = (
            rows_of(layer, "key").numpy(),
            rows_of(layer, "value").numpy(),
            rows_of(layer, "key").numpy()[:, ::-1],
        )
        rotated_q = rotate("key", layer.index, q)
        back = rotate(
            "value", layer.index, np.stack([np.eye(layer.value_dim, dtype=np.float32)] * len(v))
        ).swapaxes(-1, -2)
        through = (
            attend(rotated_q, rotate("key", layer.index, k), rotate("value", layer.index, v)) @ back
        )
        if not recipe.center_keys:
            assert np.abs(through - attend(q, k, v)).max() < 1e-4  # measured 1e-5
        for side, rows in (("key", k), ("value", v)):
            clip = done_clip(engine, recipe, side)
            group = recipe.group(rows.shape[-1])
            matrix = matrices(artifact, layer, side, pooled)
            expected_rows = torch.from_numpy(rows)
            if recipe.center_keys and side == "key":
                expected_rows = (
                    expected_rows
                    - artifact.rotation_tensors()[f"layers.{layer.index}.key.mean"][:, None]
                )
            wanted = expected_rows @ (matrix.mT if transpose else matrix)
            codes, packed = engines.STORE[engine](rotate(side, layer.index, rows), clip, group)
            if engine == "llama.cpp":
                reference = engines.store_q2_0(wanted.numpy(), clip, group)
                assert_codes(codes, reference[0])
                continue
            form = int2.FORMATS.get(engine, int2.SGLANG)
            stored = int2.quantize(wanted, clip, group, form).codes
            assert_codes(codes, stored.numpy())
            same = (codes == stored.numpy()).all(-1)
            assert (packed == int2.pack(stored, form.packing).numpy())[same].all()


def assert_codes(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal; a product of two libraries may differ in the last bit, which moves at most one code in
    a thousand."""
    different = (found != expected).mean()
    assert different < 1e-3, f"{different:.1%} of the codes differ"


def done_clip(engine: str, recipe: Recipe, side: str) -> float:
    agreed = AGREED[engine].get("clip")
    return agreed[0] if agreed else recipe.key_clip if side == "key" else recipe.value_clip


@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_read_as_the_engine_does(engine, made, tmp_path):
    artifact = made(head_dim=32)
    done = exported(engine, artifact, tmp_path)
    check_engine(engine, artifact, done)
    with pytest.raises(AssertionError, match="of the codes differ"):
        check_engine(engine, artifact, done, transpose=True)
    record = json.loads((done.path / "export.json").read_text())
    assert record["artifact"] == artifact.identity
    assert record["files"] == {name: sha256(done.path / name) for name in record["files"]}
    assert {path.name for path in done.path.iterdir()} == {*record["files"], "export.json"}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_layers_of_a_hybrid_keep_their_numbers(engine, made, tmp_path):
    """Only layer 3 of four caches keys; a loader that counted cached layers would take it for layer
    0."""
    artifact = made("qwen3_5", head_dim=32)
    agreed = {}
    if engine == "llama.cpp":
        base = base_for(artifact, tmp_path, "qwen35")
        agreed = {"options": Options(base=base), "clip": (1.0, 1.0), "windows": (0, 0)}
    done = exported(engine, artifact, tmp_path / "x", **agreed)
    if engine != "llama.cpp":
        check_engine(engine, artifact, done)
        return
    names = {tensor.name for tensor in gguf.GGUFReader(next(done.path.glob("*.gguf"))).tensors}
    assert {name for name in names if "rot" in name} == {
        "blk.3.attn_k_rot.weight",
        "blk.3.attn_v_rot.weight",
    }


# Gemma 4 has two head dimensions, MiMo keys of 16 with values of 12.
SUPPORTS = {
    "gemma4": {
        "sglang": None, "mlx": "whole heads of", "onnx": "the cache of another layer", "vllm": "whole heads of",
        "llama.cpp": "32 channels",
    },
    "mimo_v2_flash": {
        "sglang": "head dimension 12", "mlx": "head dimension 12", "onnx": "values of dimension 12",
        "vllm": "values of dimension 12", "llama.cpp": "values of dimension 12",
    },
    "phi3": {"sglang": "head dimension 24", "mlx": "head dimension 24", "onnx": None, "vllm": None, "llama.cpp": "32 channels"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "engine"), [(family, engine) for family in SUPPORTS for engine in ENGINES]
)
def test_other_geometries_are_served_or_refused(family, engine, made, tmp_path):
    changes = {"hidden_size": 96} if family == "phi3" else {}
    artifact = made(family, **changes)
    reason = SUPPORTS[family][engine]
    if reason is None:
        check_engine(engine, artifact, exported(engine, artifact, tmp_path))
        return
    with pytest.raises(RotationZooError, match=reason):
        exported(engine, artifact, tmp_path)
    assert not (tmp_path / "out").exists()


def test_two_head_dimensions_in_a_gguf(made, tmp_path):
    """Gemma 4's loader sizes each layer; Qwen3's does not."""
    artifact = made("gemma4", head_dim=32, global_head_dim=64)
    geometry = layers_of(artifact)
    assert [layer.key_dim for layer in geometry] == [32, 64]
    for architecture in ("gemma4", "qwen3"):
        base = engines.write_base(tmp_path / f"{architecture}.gguf", 2, 64, 4, 2, 32, architecture)
        widen(
            base,
            tmp_path / "wide.gguf",
            ("blk.1.attn_k.weight", "blk.1.attn_v.weight"),
            geometry[1],
        )
        request = Request(
            "llama.cpp", tmp_path / architecture, pooled=True, clip=(1.0, 1.0), windows=(0, 0),
            options=Options(base=tmp_path / "wide.gguf"),
        )  # fmt: skip
        if architecture == "qwen3":
            with pytest.raises(RotationZooError, match="loads one head dimension"):
                export(artifact, request)
            continue
        done = export(artifact, request)
        assert done.launch.environment["LLAMA_KV_V_ROT"] == "1"
        rotate = engines.read_llama(done.path, {}, 2)
        for layer in geometry:
            matrix = matrices(artifact, layer, "key", pooled=True)
            rows = rows_of(layer, "key")
            assert (
                np.abs(rotate("key", layer.index, rows.numpy()) - (rows @ matrix).numpy()).max()
                < 1e-5
            )


def widen(base: Path, target: Path, names: tuple[str, ...], layer) -> None:
    """A copy of a GGUF file with some projections of another width."""
    reader = gguf.GGUFReader(base)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name in names:
            data = np.zeros((layer.kv_heads * layer.key_dim, data.shape[1]), np.float16)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- what an engine does not take


def test_what_an_engine_does_not_take_is_refused_with_the_whole_command(made, tmp_path):
    artifact = made(recipe=CENTERED, head_dim=32)
    with pytest.raises(
        RotationZooError, match=r"one rotation per layer.*keep their mean.*a single clip ratio"
    ) as refused:
        exported("llama.cpp", artifact, tmp_path, pooled=False, clip=None)
    assert refused.value.hint == "to accept that, add: --pooled --uncentered --clip 0.96"
    assert "per KV head (--pooled)" in str(refused.value)
    with pytest.raises(RotationZooError, match="no tokens kept exact") as refused:
        exported("vllm", artifact, tmp_path, windows=None)
    assert refused.value.hint == "to accept that, add: --uncentered --windows 0/0"
    done = exported("vllm", artifact, tmp_path, uncentered=True)
    assert len(done.reduced) == 3, done.reduced


def test_values_without_their_mean_are_served_by_no_engine(made, tmp_path):
    artifact = made(recipe=CENTERED.model_copy(update={"center_values": True}), head_dim=32)
    with pytest.raises(
        RotationZooError, match=r"only with values that keep their mean \(--uncentered\)"
    ) as refused:
        exported("sglang", artifact, tmp_path)
    assert refused.value.hint == "to accept that, add: --uncentered"
    with pytest.raises(RotationZooError, match="keys and values that keep their mean"):
        exported("vllm", artifact, tmp_path)
    done = exported("sglang", artifact, tmp_path, uncentered=True)
    assert done.reduced == ["keys and values that keep their mean"]


def test_clip_ratios_of_single_heads(made, tmp_path, monkeypatch):
    """No recipe makes such an artifact yet, so its verification, which knows that, is left out."""
    monkeypatch.setattr(exporting, "verify", lambda artifact: Verification([], None, []))
    artifact = made(head_dim=32)
    tensors = artifact.rotation_tensors()
    tensors["layers.1.key.clip"][1] = 0.9
    changed = write_artifact(
        tmp_path / "changed",
        rotations_from(tensors),
        artifact.statistics,
        dict(artifact.content),
    )
    for engine, words in (("sglang", "one clip ratio for all keys"), ("onnx", "one a layer")):
        with pytest.raises(RotationZooError, match=words) as refused:
            exported(engine, changed, tmp_path / engine)
        assert refused.value.hint == "to accept that, add: --clip 0.96/0.92"
    tensors["layers.1.key.clip"][0] = 0.9
    changed = write_artifact(
        tmp_path / "changed",
        rotations_from(tensors),
        artifact.statistics,
        dict(artifact.content),
    )
    done = exported("onnx", changed, tmp_path / "onnx")
    attributes = json.loads((done.path / "attributes.json").read_text())["layers"]
    assert [attributes[layer]["k_quant_rho"] for layer in "012"] == [0.96, 0.9, 0.96]
    done = exported("sglang", changed, tmp_path / "sglang", clip=(1.0, 0.92))
    assert done.launch.environment["SGLANG_OSCAR_K_CLIP_RATIO"] == "0", "SGLang's word for off"
    assert done.reduced == ["clip ratios 1/0.92 instead of the artifact's own"]


def test_rotations_of_a_search_are_for_their_clip_ratios_and_means(made, tmp_path):
    artifact = made(recipe=CENTERED, head_dim=32)
    ratios = {side: {"clip": ratio} for side, ratio in (("key", 0.96), ("value", 0.92))}
    search = {"layers": {}, "model": {**ratios, "by_side": {}, "kept": "own", "trimmed": 0.1}}
    searched = write_artifact(
        tmp_path / "searched",
        artifact.rotations,
        artifact.statistics,
        {**artifact.content, "search": search},
    )
    done = exported("sglang", searched, tmp_path / "sglang", clip=(1.0, 0.92))
    assert [words.partition(", for which a search chose")[1] != "" for words in done.reduced] == [
        True
    ]
    with pytest.raises(RotationZooError) as refused:
        exported("mlx", searched, tmp_path / "mlx")
    assert (
        refused.value.hint
        == "to accept that, add: --uncentered; made for such engines: --recipe best-uncentered"
    )


def test_other_refusals(made, tmp_path):
    artifact = made(head_dim=32)
    with pytest.raises(RotationZooError, match="multiples of 8"):
        exported("sglang", artifact, tmp_path, windows=(60, 256))
    with pytest.raises(RotationZooError, match="no token is kept exact"):
        exported("onnx", artifact, tmp_path, windows=(0, 0))
    with pytest.raises(RotationZooError, match="one scale a head"):
        exported(
            "vllm", made(recipe=OSCAR.model_copy(update={"group_size": 16}), head_dim=32), tmp_path
        )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(RotationZooError, match="holds other files"):
        exported("sglang", artifact, tmp_path)
    bare = write_artifact(
        tmp_path / "bare", artifact.rotations, None, dict(artifact.content)
    )
    with pytest.raises(RotationZooError, match="has no statistics"):
        exported("vllm", bare, tmp_path / "vllm")


def test_a_damaged_artifact_is_not_exported(made, tmp_path):
    artifact = made(head_dim=32)
    copy = tmp_path / "copy"
    shutil.copytree(artifact.folder, copy)
    data = bytearray((copy / "rotations.safetensors").read_bytes())
    data[-40] ^= 1
    (copy / "rotations.safetensors").write_bytes(data)
    with pytest.raises(RotationZooError, match="its sha256 differs"):
        exported("sglang", Artifact.open(copy), tmp_path)


def test_a_record_of_unknown_origin_removes_nothing_elsewhere(made, tmp_path):
    artifact = made(head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("")
    for content in ({"files": {"../victim": "", str(victim): ""}}, [1], {"files": 3}):
        (done.path / "export.json").write_text(json.dumps(content))
        exported("sglang", artifact, tmp_path)
        assert victim.exists()


def test_two_exports_at_once_do_not_share_a_folder(made, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "WAIT", 0.1)
    with (
        folders.temporary_sibling(tmp_path / "out"),
        pytest.raises(RotationZooError, match="another process is writing"),
    ):
        exported("sglang", made(head_dim=32), tmp_path)
    assert exported("sglang", made(head_dim=32), tmp_path).files


@pytest.mark.parametrize("engine", ENGINES)
def test_servers_that_run_as_somebody_else_can_read_the_files(engine, made, tmp_path):
    """safetensors makes files for their owner alone."""
    done = exported(engine, made(head_dim=32), tmp_path)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in done.path.iterdir()}
    assert modes == dict.fromkeys((*done.files, "export.json"), "0o644")


# ---- SGLang


def test_what_nobody_has_verified_is_said(made, tmp_path):
    two = made(recipe=OSCAR.model_copy(update={"group_size": 16}), head_dim=32)
    (note,) = [
        note for note in exported("sglang", two, tmp_path).launch.notes if "groups a head" in note
    ]
    assert note.startswith("2 groups a head: the server's prefill with more than one is unverified")
    one = exported("sglang", made(head_dim=32), tmp_path / "one")
    assert not [note for note in one.launch.notes if "groups a head" in note]


@pytest.mark.parametrize("pooled", [False, True])
def test_sglang_versions(made, tmp_path, pooled):
    artifact = made(head_dim=32)
    done = exported("sglang", artifact, tmp_path, pooled=pooled)
    names = (
        ["k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"]
        if pooled
        else ["k_rotation_perhead.pt", "v_rotation_perhead.pt"]
    )
    assert sorted(done.files) == names
    content = torch.load(done.path / names[0], weights_only=True)
    assert list(content) == [
        "format_version",
        "objective",
        "source_grouping",
        "calibration",
        "layers",
    ]
    assert content["format_version"] == (1 if pooled else 2)
    assert content["source_grouping"] == ("layer" if pooled else "per_kv_head")
    assert [type(layer) for layer in content["layers"]] == [int] * 4
    assert content["layers"][1]["rotation"].shape == ((32, 32) if pooled else (2, 32, 32))
    eigenvalues = content["layers"][1]["eigenvalues"]
    assert (eigenvalues.diff(dim=-1) >= 0).all()
    assert all(
        isinstance(value, str | int | float | bool) for value in content["calibration"].values()
    )
    assert content["calibration"]["artifact"] == artifact.identity
    assert content["calibration"]["key_clip"] == 0.96
    if pooled:  # the rotation of the mean moment, not the mean of rotations
        moment = artifact.statistics_tensors()["layers.1.query.second_moment"].mean(0)
        diagonal = torch.linalg.eigvalsh(moment)
        assert torch.allclose(eigenvalues.double(), diagonal, rtol=1e-5)


def test_sglang_version_3_carries_the_key_mean(made, tmp_path):
    artifact = made(recipe=CENTERED, head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    assert sorted(done.files) == ["k_rotation_oscar2_center.pt", "v_rotation_oscar2_center.pt"]
    keys = torch.load(done.path / "k_rotation_oscar2_center.pt", weights_only=True)
    assert keys["format_version"] == 3
    assert keys["transform"] == {"key": "center", "centered": True, "orthogonal": True}
    assert torch.equal(
        keys["layers"][2]["k_mean"], artifact.statistics_tensors()["layers.2.key.mean"].float()
    )
    assert all(
        "k_mean" not in e
        for e in torch.load(done.path / "v_rotation_oscar2_center.pt")["layers"].values()
    )
    check_engine("sglang", artifact, done)
    # the mean taken from all keys moves every score of a query by the same number
    layer = layers_of(artifact)[2]
    rotate = engines.read_sglang(done.path, done.launch.environment, layer.kv_heads)
    q, k, v = (rows_of(layer, side).numpy() for side in ("key", "key", "value"))
    rotated_q = q @ artifact.rotation_tensors()["layers.2.key.rotation"].numpy()
    assert np.abs(attend(rotated_q, rotate("key", 2, k), v) - attend(q, k, v)).max() < 1e-4
    shared = exported("sglang", artifact, tmp_path / "pooled", pooled=True)
    entry = torch.load(shared.path / "k_rotation_oscar2_center.pt")["layers"][0]
    assert (entry["rotation"].shape, entry["k_mean"].shape) == ((32, 32), (2, 32))


def test_a_data_free_artifact_says_so_in_its_name(made, tmp_path):
    artifact = made(recipe=PRESETS["hadamard"], head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    assert sorted(done.files) == [
        "k_rotation_hadamard_perhead.pt",
        "v_rotation_hadamard_perhead.pt",
    ]
    done = exported("sglang", artifact, tmp_path / "2", pooled=True)
    assert sorted(done.files) == ["k_rotation_hadamard.pt", "v_rotation_hadamard.pt"]


def reader_holds(path: str, started, seconds: float) -> None:
    """A server that loads a pair under its shared lock."""
    with open(path, "a+") as handle:
        fcntl.flock(handle.fileno(), fcntl.LOCK_SH)
        started.set()
        time.sleep(seconds)


def test_a_pair_is_replaced_alone_and_never_half(made, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_OSCAR_CALIBRATION_LOCK_DIR", str(tmp_path / "locks"))
    artifact, other = (
        made(head_dim=32),
        made(recipe=OSCAR.model_copy(update={"value_statistic": "value"}), head_dim=32),
    )
    done = exported("sglang", artifact, tmp_path)
    assert not list(done.path.glob(".oscar*")), "a new folder appears whole"
    exported("sglang", other, tmp_path)
    assert not list(done.path.glob(".oscar*")), "and takes the place of another whole"
    (lock,) = (tmp_path / "locks").iterdir()
    assert (
        lock.stem
        == f"oscar_{sglang.markers(*(done.path / name for name in sorted(done.files)))[0]}"
    )

    monkeypatch.setattr(
        logging.getLogger("rotationzoo"), "propagate", True
    )  # which a command before this may have ended
    started = multiprocessing.get_context("spawn").Event()
    reader = multiprocessing.get_context("spawn").Process(
        target=reader_holds, args=(str(lock), started, 2.0)
    )
    reader.start()
    assert started.wait(60)
    begun = time.monotonic()
    exported("sglang", artifact, tmp_path)
    assert time.monotonic() - begun > 0.5, "it waits for the server that reads the pair"
    assert "that is reading or writing" in caplog.text, "and says so"
    reader.join()

    monkeypatch.setattr(folders, "WAIT", 0.2)
    with lock.open("a+") as server:
        fcntl.flock(server, fcntl.LOCK_SH)
        with pytest.raises(RotationZooError, match=r"\(an SGLang server\); gave up after 0.2 s"):
            exported("sglang", other, tmp_path)
    whole = exported("sglang", artifact, tmp_path)
    assert {name: sha256(done.path / name) for name in whole.files} == whole.files


# ---- llama.cpp


def test_a_gguf_keeps_everything_else(made, tmp_path):
    artifact = made(head_dim=32)
    base = base_for(artifact, tmp_path)
    done = exported("llama.cpp", artifact, tmp_path, options=Options(base=base))
    before, after = gguf.GGUFReader(base), gguf.GGUFReader(next(done.path.glob("*.gguf")))
    tensors = {tensor.name: tensor for tensor in after.tensors}
    for tensor in before.tensors:
        copy = tensors.pop(tensor.name)
        assert (copy.tensor_type, list(copy.shape)) == (tensor.tensor_type, list(tensor.shape))
        assert copy.data.tobytes() == tensor.data.tobytes(), tensor.name
    assert sorted(tensors) == sorted(f"blk.{i}.attn_{s}_rot.weight" for i in range(4) for s in "kv")
    counted = ("GGUF.tensor_count", "GGUF.kv_count")
    for name, field in before.fields.items():
        if name not in counted:
            assert after.fields[name].contents() == field.contents(), name
            assert after.fields[name].types == field.types, name
    notes = {
        name: f.contents() for name, f in after.fields.items() if name.startswith("rotationzoo.")
    }
    assert notes["rotationzoo.artifact"] == artifact.identity
    assert notes["rotationzoo.engine_hadamard"] is False
    assert any("cancels the calibrated one" in note for note in done.launch.notes)
    assert done.launch.environment == {
        "LLAMA_KV_NO_HADAMARD": "1", "LLAMA_ATTN_ROT_DISABLE": "1", "LLAMA_KV_CLIP_RATIO": "0.96",
        "LLAMA_KV_HP_SINK": "8", "LLAMA_KV_HP_RECENT": "16",
    }  # fmt: skip
    with pytest.raises(RotationZooError, match="has rotations already"):
        exported(
            "llama.cpp",
            artifact,
            tmp_path / "again",
            options=Options(base=next(done.path.glob("*.gguf"))),
        )


@pytest.mark.parametrize("dim", [64, 128])
def test_the_engines_own_hadamard_is_counted_on(made, tmp_path, dim):
    """llama.cpp's attention rotation: all of a key, blocks of 64 of a value. After it, what is
    stored is `x R` again; without the option it would cancel the calibrated Hadamard of the
    keys."""
    artifact = made(head_dim=dim)
    done = exported(
        "llama.cpp",
        artifact,
        tmp_path,
        options=Options(base_for(artifact, tmp_path), engine_hadamard=True),
    )
    assert "LLAMA_ATTN_ROT_DISABLE" not in done.launch.environment
    rotate = engines.read_llama(done.path, {}, 2)
    sylvester = {64: hadamard(64).float().numpy(), dim: hadamard(dim).float().numpy()}
    for layer in layers_of(artifact):
        for side, block in (("key", dim), ("value", 64)):
            rows, matrix = rows_of(layer, side), matrices(artifact, layer, side, pooled=True)
            graph = rotate(side, layer.index, rows.numpy())
            by_engine = (graph.reshape(*graph.shape[:-1], -1, block) @ sylvester[block]).reshape(
                graph.shape
            )
            assert np.abs(by_engine - (rows @ matrix).numpy()).max() < 2e-4
    first = matrices(artifact, layers_of(artifact)[0], "key", pooled=True)[0]
    _, basis = torch.linalg.eigh(
        artifact.statistics_tensors()["layers.0.query.second_moment"].mean(0)
    )
    overlap = (basis.mT @ (first.double() @ hadamard(dim))).abs()
    assert (overlap.amax(0) > 0.999).all(), (
        "columns of R H are eigenvectors: R alone is not what such an engine should have"
    )
    keys, values = gather([next(done.path.glob("*.gguf"))])
    assert torch.allclose(keys.content.rotation[0], first, atol=1e-6)
    assert torch.allclose(
        values.content.rotation[0],
        matrices(artifact, layers_of(artifact)[0], "value", pooled=True)[0],
        atol=1e-6,
    )


def test_an_engine_that_does_not_rotate_small_heads(made, tmp_path):
    artifact = made(head_dim=32)
    options = Options(base_for(artifact, tmp_path), engine_hadamard=True)
    with pytest.raises(RotationZooError, match="rotates no heads of dimension 32"):
        exported("llama.cpp", artifact, tmp_path, options=options)


def test_bases_that_do_not_fit(made, tmp_path):
    artifact = made(head_dim=32)
    for shape, reason in (
        (dict(layers=2), "has no keys in layers 2, 3, and the artifact has rotations"),
        (dict(layers=6), "layer 4 caches keys there"),
        (dict(kv_heads=1), "has 32 rows"),
        (dict(architecture="llama"), "of architecture llama"),
        (dict(architecture="qwen3moe"), "neither clips nor keeps tokens exact"),
    ):
        options = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "dim": 32, **shape}
        base = engines.write_base(tmp_path / "wrong.gguf", **options)
        with pytest.raises(RotationZooError, match=reason):
            exported("llama.cpp", artifact, tmp_path, options=Options(base=base))
    (tmp_path / "none.gguf").write_bytes(b"GGUF or not")
    with pytest.raises(RotationZooError, match="is no GGUF file"):
        exported("llama.cpp", artifact, tmp_path, options=Options(base=tmp_path / "none.gguf"))
    with pytest.raises(RotationZooError, match="model's own file") as refused:
        exported("llama.cpp", artifact, tmp_path, options=Options())
    assert "--base" in refused.value.hint


def converted(model: Path, target: Path, embedding: gguf.GGMLQuantizationType, **changes) -> Path:
    """The tiny model as a converter writes it, with other weights or fields if `changes` says
    so."""
    weights = {**load_file(model / "model.safetensors"), **changes.pop("weights", {})}
    config = json.loads((model / "config.json").read_text())
    config = {**config["rope_parameters"], **config, **changes}
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for i in range(2):
        names[f"model.layers.{i}.input_layernorm.weight"] = f"blk.{i}.attn_norm.weight"
        for side in "kv":
            names[f"model.layers.{i}.self_attn.{side}_proj.weight"] = f"blk.{i}.attn_{side}.weight"
    for original, name in names.items():
        kind = embedding if name == "token_embd.weight" else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            name, gguf.quants.quantize(weights[original].float().numpy(), kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope="module")
def of_a_model(tmp_path_factory) -> tuple[Path, Artifact]:
    """A model of head dimension 32, with norms that tell it from others, and an artifact that was
    made for it."""
    folder = tmp_path_factory.mktemp("model")
    config = {"head_dim": 32, "hidden_size": 64, "rope_theta": 5e5}
    model = save_tiny(folder / "tiny", **config)
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            weights[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator).to(
                tensor.dtype
            )
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    recipe = OSCAR.model_copy(update={"data": Data(tokens=512, length=256)})
    return model, calibrate(Job(str(model), recipe, folder / "artifact", device="cpu"))


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_a_base_that_was_converted_from_the_model(of_a_model, tmp_path, kind):
    model, artifact = of_a_model
    base = converted(model, tmp_path / "base.gguf", gguf.GGMLQuantizationType[kind])
    notes = exported(
        "llama.cpp", artifact, tmp_path, options=Options(base=base, model=str(model))
    ).launch.notes
    tensors = (
        "output_norm.weight, blk.0.attn_norm.weight, blk.1.attn_norm.weight, token_embd.weight"
    )
    assert f"the base has the weights of {model}, as far as {tensors} show" in notes


@pytest.mark.parametrize(
    "what", ["norm", "last norm", "embedding", "width", "layers", "heads", "base of RoPE"]
)
def test_a_base_of_another_model_is_refused(of_a_model, tmp_path, what):
    model, artifact = of_a_model
    names = {
        "norm": "model.norm",
        "last norm": "model.layers.1.input_layernorm",
        "embedding": "model.embed_tokens",
    }
    if what in names:
        name = f"{names[what]}.weight"
        weights = load_file(model / "model.safetensors")
        changes = {"weights": {name: weights[name].flip(0)}}
    else:
        changes = {
            "width": {"hidden_size": 96}, "layers": {"num_hidden_layers": 3}, "heads": {"num_attention_heads": 8},
            "base of RoPE": {"rope_theta": 1e6},
        }[what]  # fmt: skip
    base = converted(model, tmp_path / "base.gguf", gguf.GGMLQuantizationType.Q8_0, **changes)
    with pytest.raises(
        RotationZooError, match=f"base.gguf was not converted from {re.escape(str(model))}"
    ):
        exported("llama.cpp", artifact, tmp_path, options=Options(base=base, model=str(model)))
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        RotationZooError, match="demo is not the model of this artifact: its config differs"
    ):
        exported("llama.cpp", artifact, tmp_path, options=Options(base=base, model="demo"))


def test_a_base_that_cannot_be_compared_is_said_to_be_so(made, tmp_path):
    notes = exported("llama.cpp", made(head_dim=32), tmp_path).launch.notes
    assert (
        "the base was compared by its shapes alone: tiny/qwen3 was not found on this machine (--model says where it is)"
        in notes
    )
    assert any(
        note.startswith("keep the base: llama.cpp itself refuses the copy") for note in notes
    )
    assert any(
        "rotations can serve worse than none" in note and "exact windows" in note for note in notes
    )


# ---- MLX


def test_mlx_itself_multiplies_by_the_rotation(made, tmp_path):
    mx = pytest.importorskip("mlx.core")
    artifact = made(head_dim=32)
    done = exported("mlx", artifact, tmp_path)
    stored = mx.load(str(done.path / "k_rotation.safetensors"))
    rows = rows_of(layers_of(artifact)[1], "key")
    found = np.array(mx.array(rows.numpy()) @ mx.swapaxes(stored["layer_1"], -1, -2))
    assert (
        np.abs(found - (rows @ artifact.rotation_tensors()["layers.1.key.rotation"]).numpy()).max()
        < 1e-4
    )


# ---- values in the weights


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_that_need_no_value_rotation(engine, made, tmp_path):
    artifact = made(head_dim=32)
    model = tmp_path / "a model"
    model.mkdir()
    for record, words in (
        (None, "has no rotationzoo.json"),
        ({"artifact": "0" * 64}, "of another artifact"),
    ):
        if record:
            (model / "rotationzoo.json").write_text(json.dumps(record))
        with pytest.raises(RotationZooError, match=words):
            exported(engine, artifact, tmp_path, values_absorbed=model)
    (model / "rotationzoo.json").write_text(json.dumps({"artifact": artifact.identity}))
    done = exported(engine, artifact, tmp_path, values_absorbed=model)
    layer = layers_of(artifact)[1]
    rows = rows_of(layer, "value").numpy()
    if engine in ("llama.cpp", "onnx"):
        with pytest.raises((KeyError, IndexError)):
            engines.READ[engine](done.path, done.launch.environment, layer.kv_heads)(
                "value", 1, rows
            )
    else:
        rotate = engines.READ[engine](done.path, done.launch.environment, layer.kv_heads)
        assert np.array_equal(rotate("value", 1, rows), rows)
    if engine == "sglang":
        assert "v_rotation_identity.pt" in done.files, "under its own name"
    if engine in ("sglang", "vllm"):
        assert f"'{model}'" in done.launch.command[0], "that model, and quoted"


# ---- the command line and the docs


def test_the_command_prints_what_starts_the_engine(made, inside):
    artifact = made(head_dim=32)
    result = inside("export", artifact.folder, "--to", "sglang")
    assert result.returncode == 0, result.stderr
    folder = inside.folder / "exports" / f"{artifact.folder.name}-sglang"
    assert f"SGLANG_OSCAR_K_ROTATION_PATH={folder}/k_rotation_perhead.pt \\" in result.stdout
    launched = result.stdout.replace("\\\n", "").split("python -m ")[1]
    assert launched.split()[:3] == ["sglang.launch_server", "--model-path", "tiny/qwen3"]
    assert "Note: needs OSCAR's SGLang" in result.stderr
    data = json.loads(inside("export", artifact.folder, "--to", "sglang", "--json").stdout)
    assert data["environment"]["SGLANG_MIXED_KV_PREFIX_TOKENS"] == "8"
    assert set(data) == {"engine", "path", "files", "command", "environment", "notes", "reduced"}
    assert inside("export", artifact.folder).returncode == 2
    assert "--clip 2" in inside("export", artifact.folder, "--to", "mlx", "--clip", "2").stderr


def test_the_engines_page_says_what_the_code_does(made, tmp_path):
    """Each engine has a row, and its launch line there is the one that export prints for the
    default recipe."""
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    recipe = PRESETS["oscar"]
    artifact = made(recipe=recipe, head_dim=128)
    for engine in ENGINES:
        assert re.search(rf"^\| `{re.escape(engine)}` \|", page, re.M), engine
        changes = (
            {"options": Options(base=base_for(artifact, tmp_path))} if engine == "llama.cpp" else {}
        )
        done = exported(engine, artifact, tmp_path / engine, **changes)
        line = (
            exporting.launch_line(done.launch)
            .replace(str(done.path.absolute()), "FOLDER")
            .replace("tiny/qwen3", "MODEL")
        )
        assert line in page, line


def test_torch_files_hold_nothing_that_runs(made, tmp_path):
    done = exported("sglang", made(head_dim=32), tmp_path)
    for name in done.files:
        torch.load(done.path / name, weights_only=True)
        read = oscar_pt.read(done.path / name)
        assert read.format == "V2"
    assert verify(made(head_dim=32)).ok
