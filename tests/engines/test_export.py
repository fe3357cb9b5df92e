"""Exports, read as each engine reads them: attention stays exact, and codes are the engine's."""

import json
import re
import shlex
from dataclasses import replace

import gguf
import pytest
import torch
from support.engine_artifacts import CENTERED, OSCAR, WRITTEN, base_for, check_engine, exported
from support.oscar_files import refused
from support.recipes import CODED

from rotationzoo.artifact.reductions import Request, settle_request
from rotationzoo.codec.engine_needs import ENGINES
from rotationzoo.engines.export import assemble_payload, export, launch_line
from rotationzoo.engines.formats import modelopt
from rotationzoo.storage.files import sha256
from rotationzoo.writer import write_artifact


@pytest.mark.parametrize("engine", WRITTEN)
def test_an_export_read_as_the_engine_does(engine, made, tmp_path):
    artifact = made(head_dim=32)
    done = exported(engine, artifact, tmp_path)
    check_engine(engine, artifact, done)
    with pytest.raises(AssertionError, match="of the codes differ"):
        check_engine(engine, artifact, done, transpose=True)
    record = json.loads((done.path / "export.json").read_text())
    assert record["artifact"] == artifact.identity
    assert record["files"] == {name: sha256(done.path / name) for name in done.files}
    # safetensors makes files for their owner alone; servers that run as somebody else read these.
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in done.path.iterdir()}
    assert modes == dict.fromkeys((*done.files, "export.json"), "0o644")


@pytest.mark.parametrize("engine", WRITTEN)
def test_the_layers_of_a_hybrid_keep_their_numbers(engine, made, tmp_path):
    """Only layer 3 of four caches keys."""
    artifact = made("qwen3_5", head_dim=32)
    agreed = {}
    if engine == "llama.cpp":
        base = base_for(artifact, tmp_path, "qwen35")
        agreed = {"base": base, "clip": (1.0, 1.0), "windows": (0, 0)}
    done = exported(engine, artifact, tmp_path / "x", **agreed)
    if engine != "llama.cpp":
        check_engine(engine, artifact, done)
        return
    tensors = gguf.GGUFReader(next(done.path.glob("*.gguf"))).tensors
    names = sorted(tensor.name for tensor in tensors if "rot" in tensor.name)
    assert names == [f"blk.3.attn_{side}_rot.weight" for side in "kv"]


# Gemma 4 has two head dimensions, MiMo keys of 16 with values of 12.
SUPPORTS = {
    "gemma4": {"sglang": None, "vllm-oscar": "whole heads of", "llama.cpp": "32 channels"},
    "mimo_v2_flash": {
        "sglang": "head dimension 12",
        "vllm-oscar": "values of dimension 12",
        "llama.cpp": "values of dimension 12",
    },
    "phi3": {"sglang": "head dimension 24", "vllm-oscar": None, "llama.cpp": "32 channels"},
}


@pytest.mark.parametrize(
    ("family", "engine"), [(family, engine) for family in SUPPORTS for engine in WRITTEN]
)
def test_other_geometries_are_served_or_refused(family, engine, made, tmp_path):
    changes = {"hidden_size": 96} if family == "phi3" else {}
    artifact = made(family, **changes)
    reason = SUPPORTS[family][engine]
    if reason is None:
        check_engine(engine, artifact, exported(engine, artifact, tmp_path))
        return
    assert reason in refused(exported, engine, artifact, tmp_path)
    assert not (tmp_path / "out").exists()


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
    assert "--clip 2" in inside("export", artifact.folder, "--to", "sglang", "--clip", "2").stderr


# ---- the folder of an export: whole, and for servers to read


def test_a_record_of_unknown_origin_removes_nothing_elsewhere(made, tmp_path):
    artifact = made(head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("")
    for content in ({"files": {"../victim": "", str(victim): ""}}, [1], {"files": 3}):
        (done.path / "export.json").write_text(json.dumps(content))
        assert "holds other files" in refused(exported, "sglang", artifact, tmp_path)
        assert victim.exists()


def test_a_pair_is_replaced_whole(made, tmp_path):
    artifact = made(head_dim=32)
    other = made(recipe=OSCAR.model_copy(update={"value_statistic": "value"}), head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    (done.path / ".oscar_0123456789abcdef.complete.json").write_text("{}")
    exported("sglang", other, tmp_path)
    assert not list(done.path.glob(".oscar*")), "what marked the earlier pair is gone with it"


def test_modelopt_gets_the_bits_of_layers(made, tmp_path, monkeypatch):
    artifact = made(head_dim=32)
    done = exported("modelopt", artifact, tmp_path)
    assert "rotations: only the bits of each layer are written" in done.reduced
    assert algorithms(done.path) == ("NVFP4", dict.fromkeys(range(4), "NVFP4"))
    # Bits of the eight segments of a row; those of values are fewer, and do not count.
    widths = {0: [4, 4, 3, 3, 2, 2, 1, 1], 1: [4] * 8, 2: [5] + [4] * 7, 3: [8] * 8}

    def with_bits(layer, side, rotation):
        bits = torch.tensor(widths[layer]) * (side == "key")
        return replace(rotation, widths=bits.expand(len(rotation.clip), -1))

    rotations = artifact.rotations.replace(with_bits)
    monkeypatch.setitem(vars(artifact), "rotations", rotations)
    payload = assemble_payload(artifact, settle_request(artifact, Request("modelopt")))
    assert payload.bits == {0: 2.5, 1: 4, 2: 4 + 1 / 8, 3: 8}
    (tmp_path / "mixed").mkdir()
    modelopt.write_files(tmp_path / "mixed", tmp_path, payload, Request("modelopt"))
    formats = {0: "NVFP4", 1: "NVFP4", 2: "FP8", 3: "FP8"}
    assert algorithms(tmp_path / "mixed") == ("MIXED_PRECISION", formats)


def algorithms(folder) -> tuple[str, dict[int, str]]:
    """What ModelOpt's schema 1 says of a cache: of all layers, and of each."""
    content = json.loads((folder / "hf_quant_config.json").read_text())
    assert content["producer"]["name"] == "modelopt"
    said = content["quantization"]
    assert (said["quant_algo"], said["kv_cache_schema_version"]) == (None, 1)
    assert said["quantized_layers"] == {}, "of weights, which stay as they are"
    layers = {
        int(re.fullmatch(r"model\.layers\.(\d+)\.self_attn", name)[1]): each["quant_algo"]
        for name, each in said["kv_cache_quantized_layers"].items()
    }
    return said["kv_cache_quant_algo"], layers


# ---- what an engine does not serve: refused, or left out and said


SHORT = CODED.model_copy(update={"sink": 8, "recent": 16})
BOTH = CENTERED.model_copy(update={"center_values": True})
VALUES, NEAREST = "values that keep their mean", "nearest codes instead of transform coding"
LEFT_OUT = [
    ("vllm-oscar", SHORT, {}, [
        "one rotation per layer instead of one per KV head", f"keys and {VALUES}",
        "windows 0/0 instead of 8/16", NEAREST]),
    ("llama.cpp", SHORT, {}, [
        "one rotation per layer instead of one per KV head", f"keys and {VALUES}",
        "clip ratios 0.96/0.96 instead of the artifact's own", NEAREST]),
    ("sglang", SHORT, {}, [VALUES, NEAREST]),
    ("sglang", OSCAR, {"clip": (1.0, 0.92)}, ["clip ratios 1/0.92 instead of the artifact's own"]),
    ("sglang", BOTH, {}, [VALUES]),
    ("sglang", BOTH, {"uncentered": True}, [f"keys and {VALUES}"]),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "recipe", "changes", "reduced"), LEFT_OUT)
def test_what_an_engine_does_not_take_is_left_out_and_said(
    engine, recipe, changes, reduced, made, tmp_path
):
    artifact = made(recipe=recipe, head_dim=32)
    done = exported(engine, artifact, tmp_path, **changes)
    assert done.reduced == reduced
    if changes.get("clip"):
        assert done.launch.environment["SGLANG_OSCAR_K_CLIP_RATIO"] == "0", "SGLang's word for off"


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_engine_that_reads_artifacts_needs_no_files(made, tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    artifact = made(head_dim=32)
    done = export(artifact, Request(engine))
    command = ["rotationzoo", ENGINES[engine].command, "tiny/qwen3", "--revision", "0" * 40]
    assert shlex.split(launch_line(done.launch)) == [*command, "--rotations", str(artifact.folder)]
    assert (done.files, done.reduced, list(tmp_path.iterdir())) == ({}, [], [])
    assert "nothing is written for it" in refused(export, artifact, Request(engine, pooled=True))


REFUSED = [
    ("llama.cpp", OSCAR, {"clip": (0.96, 0.92)}, "has a single clip ratio"),
    ("sglang", OSCAR, {"windows": (60, 256)}, "multiples of 8"),
    ("sglang", OSCAR, {"windows": (0, 0)}, "without exact tokens"),
    ("vllm-oscar", OSCAR.model_copy(update={"group_size": 16}), {}, "one scale per head"),
]


@pytest.mark.parametrize(("engine", "recipe", "changes", "says"), REFUSED)
def test_what_a_user_asks_of_an_engine_that_has_it_not_is_refused(
    engine, recipe, changes, says, made, tmp_path
):
    artifact = made(recipe=recipe, head_dim=32)
    assert says in refused(exported, engine, artifact, tmp_path, **changes)


def test_without_statistics_nothing_is_pooled(made, tmp_path):
    artifact = made(head_dim=32)
    bare = write_artifact(tmp_path / "bare", artifact.rotations, None, dict(artifact.content))
    assert "has no statistics" in refused(exported, "vllm-oscar", bare, tmp_path / "vllm")
