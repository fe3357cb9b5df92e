"""Exports, read the way each engine reads them: exact attention without quantization, the engine's
own codes with it; and what an engine does not serve."""

import json
import re
import shlex

import gguf
import numpy as np
import pytest
from engines_table import PAGE, current_tables, tables
from support import engine_readers as engines
from support.engine_artifacts import (
    CENTERED,
    OSCAR,
    WRITTEN,
    base_for,
    check_engine,
    exported,
    layers_of,
    rows_of,
)
from support.oscar_files import refused
from support.recipes import QUICK
from support.tensors import stored_rotations

from rotationzoo.artifact.layout import rotations_from
from rotationzoo.calibration.soundness import Verification
from rotationzoo.cli.app import COMMANDS
from rotationzoo.codec.engines import ENGINE_NAMES, ENGINES, PULL_ENGINE_NAMES
from rotationzoo.codec.formats import FORMATS
from rotationzoo.engines import export as exporting
from rotationzoo.engines.base import Options
from rotationzoo.engines.export import export, launch_line
from rotationzoo.engines.payload import Request
from rotationzoo.errors import RotationZooError
from rotationzoo.recipe.loading import PRESETS
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
    assert record["files"] == {name: sha256(done.path / name) for name in record["files"]}
    # Servers that run as somebody else can read them; safetensors makes files for their owner.
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in done.path.iterdir()}
    assert modes == dict.fromkeys((*record["files"], "export.json"), "0o644")


@pytest.mark.parametrize("engine", WRITTEN)
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
        "sglang": None,
        "mlx": "whole heads of",
        "vllm-oscar": "whole heads of",
        "llama.cpp": "32 channels",
    },
    "mimo_v2_flash": {
        "sglang": "head dimension 12",
        "mlx": "head dimension 12",
        "vllm-oscar": "values of dimension 12",
        "llama.cpp": "values of dimension 12",
    },
    "phi3": {
        "sglang": "head dimension 24",
        "mlx": "head dimension 24",
        "vllm-oscar": None,
        "llama.cpp": "32 channels",
    },
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
    with pytest.raises(RotationZooError, match=reason):
        exported(engine, artifact, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", WRITTEN)
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
            exported(engine, artifact, tmp_path, absorbed=model)
    (model / "rotationzoo.json").write_text(json.dumps({"artifact": artifact.identity}))
    done = exported(engine, artifact, tmp_path, absorbed=model)
    layer = layers_of(artifact)[1]
    rows = rows_of(layer, "value").numpy()
    rotate = engines.READ[engine](done.path, done.launch.environment, layer.kv_heads)
    if engine == "llama.cpp":
        with pytest.raises((KeyError, IndexError)):
            rotate("value", 1, rows)
    else:
        assert np.array_equal(rotate("value", 1, rows), rows)
    if engine == "sglang":
        assert "v_rotation_identity.pt" in done.files, "under its own name"
    if engine in ("sglang", "vllm-oscar"):
        assert f"'{model}'" in done.launch.command[0], "that model, and quoted"


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


# ---- the folder of an export


def test_a_record_of_unknown_origin_removes_nothing_elsewhere(made, tmp_path):
    artifact = made(head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("")
    for content in ({"files": {"../victim": "", str(victim): ""}}, [1], {"files": 3}):
        (done.path / "export.json").write_text(json.dumps(content))
        exported("sglang", artifact, tmp_path)
        assert victim.exists()


def test_a_pair_is_replaced_whole(made, tmp_path):
    artifact = made(head_dim=32)
    other = made(recipe=OSCAR.model_copy(update={"value_statistic": "value"}), head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    (done.path / ".oscar_0123456789abcdef.complete.json").write_text("{}")
    exported("sglang", other, tmp_path)
    assert not list(done.path.glob(".oscar*")), "what marked the earlier pair is gone with it"
    whole = exported("sglang", artifact, tmp_path)
    assert {name: sha256(done.path / name) for name in whole.files} == whole.files


# ---- what an engine does not serve


def test_what_an_engine_does_not_take_is_left_out_and_said(made, tmp_path):
    recipe = CENTERED.model_copy(update={"center_values": True, "feedback": True})
    artifact = made(recipe=recipe, head_dim=32)
    both, nearest = (
        "keys and values that keep their mean",
        "nearest codes instead of error feedback",
    )
    pooled = "one rotation per layer instead of one per KV head"
    assert exported("vllm-oscar", artifact, tmp_path / "vllm").reduced == [
        pooled,
        both,
        "windows 0/0 instead of 8/16",
        nearest,
    ]
    done = exported("llama.cpp", artifact, tmp_path / "llama")
    assert "clip ratios 0.96/0.96 instead of the artifact's own" in done.reduced
    done = exported("sglang", artifact, tmp_path / "sglang")
    assert done.reduced == ["values that keep their mean", nearest]
    done = exported("sglang", artifact, tmp_path / "older", uncentered=True)
    assert done.reduced == [both, nearest]
    assert exported("mlx", artifact, tmp_path / "mlx").reduced == [both, nearest]


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_engine_that_reads_artifacts_needs_no_files(made, tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    artifact = made(head_dim=32)
    done = export(artifact, Request(engine))
    command = ["rotationzoo", ENGINES[engine].command, "tiny/qwen3", "--revision", "0" * 40]
    assert shlex.split(launch_line(done.launch)) == [*command, "--rotations", str(artifact.folder)]
    assert (done.files, done.reduced, list(tmp_path.iterdir())) == ({}, [], [])
    assert "nothing is written for it" in refused(export, artifact, Request(engine, pooled=True))


def test_clip_ratios_of_single_heads(made, tmp_path, monkeypatch):
    """No recipe makes such an artifact yet, so its verification, which knows that, is left out."""
    monkeypatch.setattr(exporting, "verify", lambda artifact: Verification([], None, []))
    artifact = made(head_dim=32)
    tensors = stored_rotations(artifact)
    tensors["layers.1.key.clip"][1] = 0.9
    changed = write_artifact(
        tmp_path / "changed",
        rotations_from(tensors),
        artifact.statistics,
        dict(artifact.content),
    )
    done = exported("sglang", changed, tmp_path / "highest")
    assert done.reduced == ["clip ratios 0.96/0.92 instead of the artifact's own"]
    done = exported("sglang", changed, tmp_path / "sglang", clip=(1.0, 0.92))
    assert done.launch.environment["SGLANG_OSCAR_K_CLIP_RATIO"] == "0", "SGLang's word for off"
    assert done.reduced == ["clip ratios 1/0.92 instead of the artifact's own"]


def test_other_refusals(made, tmp_path):
    artifact = made(head_dim=32)
    assert "multiples of 8" in refused(exported, "sglang", artifact, tmp_path, windows=(60, 256))
    windows = {"windows": (8, 16)}
    assert "keeps no tokens" in refused(exported, "vllm-oscar", artifact, tmp_path, **windows)
    with pytest.raises(RotationZooError, match="single clip ratio") as one:
        exported("llama.cpp", artifact, tmp_path, clip=(0.96, 0.92))
    assert one.value.hint == "--clip 0.96"
    with pytest.raises(RotationZooError, match="one scale a head"):
        exported(
            "vllm-oscar",
            made(recipe=OSCAR.model_copy(update={"group_size": 16}), head_dim=32),
            tmp_path,
        )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    assert "holds other files" in refused(exported, "sglang", artifact, tmp_path)
    bare = write_artifact(tmp_path / "bare", artifact.rotations, None, dict(artifact.content))
    assert "has no statistics" in refused(exported, "vllm-oscar", bare, tmp_path / "vllm")


# ---- the rows of codec.engines, and what else names engines


def test_every_row_has_files_or_a_command_of_ours():
    assert [name for name, entry in ENGINES.items() if entry.command] == ["vllm", "transformers"]
    for name, entry in ENGINES.items():
        assert bool(entry.module) != (entry.command in COMMANDS), name
        assert entry.recipe in PRESETS
        assert entry.format in ("", *FORMATS)


def test_the_command_line_offers_every_engine(inside):
    """`pull` has no base model to give."""
    refused = inside("export", "anything", "--to", "unheard of").stderr
    assert re.findall(r"'([^']+)'", refused.partition("not one of")[2]) == list(ENGINE_NAMES)
    refused = inside("pull", "anything", "--to", "unheard of").stderr
    assert re.findall(r"'([^']+)'", refused.partition("not one of")[2]) == list(PULL_ENGINE_NAMES)


def test_a_card_names_engines_that_there_are(made):
    """The card's package cannot ask the registry, which is above it. It may leave a new engine
    out; cards that are published must not change with every engine."""
    card = made(recipe=QUICK, head_dim=128).folder / "README.md"
    line = re.search(r"--for (\S+) +# or ([\w., ]+)", card.read_text(encoding="utf-8"))
    named = [line[1], *line[2].strip().split(", ")]
    assert len(named) > 1
    assert set(named) <= set(ENGINE_NAMES)


def test_the_tables_of_the_engines_page_are_the_code_s():
    """`python scripts/tools/engines_table.py` rewrites it."""
    assert current_tables(PAGE.read_text(encoding="utf-8")) == tables()


def test_the_engines_page_says_what_the_code_does(made, tmp_path):
    """Each engine has a row, and its launch line there is the one that export prints for the
    default recipe."""
    page = PAGE.read_text(encoding="utf-8")
    artifact = made(recipe=QUICK, head_dim=128)
    for engine in WRITTEN:
        assert re.search(rf"^\| `{re.escape(engine)}` \|", page, re.MULTILINE), engine
        changes = {}
        if ENGINES[engine].needs_base:
            changes["options"] = Options(base=base_for(artifact, tmp_path))
        done = exported(engine, artifact, tmp_path / engine, **changes)
        line = launch_line(done.launch).replace(str(done.path.absolute()), "FOLDER")
        line = line.replace("tiny/qwen3", "MODEL")
        assert line in page, line
