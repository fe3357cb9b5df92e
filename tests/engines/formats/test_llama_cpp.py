"""Rotations in a copy of a GGUF file, and which base they are copied into."""

import sys

import gguf
import numpy as np
import pytest
from support import engine_readers as engines
from support.engine_artifacts import base_for, exported, layers_of, matrices, rows_of
from support.oscar_files import refused

from rotationzoo.artifact.reductions import Request
from rotationzoo.engines import formats
from rotationzoo.engines.export import export
from rotationzoo.errors import RotationZooError


def test_two_head_dimensions_in_a_gguf(made, tmp_path):
    """Gemma 4's loader sizes each layer; Qwen3's does not."""
    artifact = made("gemma4", head_dim=32, global_head_dim=64)
    geometry = layers_of(artifact)
    assert [layer.key_dim for layer in geometry] == [32, 64]
    for architecture in ("gemma4", "qwen3"):
        path = tmp_path / f"{architecture}.gguf"
        wide = engines.write_base(path, 2, 64, 4, 2, 32, architecture, dims={1: 64})
        agreed = dict(pooled=True, clip=(1.0, 1.0), windows=(0, 0), base=wide)
        request = Request("llama.cpp", tmp_path / architecture, **agreed)
        if architecture == "qwen3":
            with pytest.raises(RotationZooError, match="loads one head dimension"):
                export(artifact, request)
            continue
        done = export(artifact, request)
        assert done.launch.environment["LLAMA_KV_V_ROT"] == "1"
        rotate = engines.read_llama(done.path, {}, 2)
        for layer in geometry:
            rows = rows_of(layer, "key")
            expected = (rows @ matrices(artifact, layer, "key", pooled=True)).numpy()
            assert np.abs(rotate("key", layer.index, rows.numpy()) - expected).max() < 1e-5


def test_a_gguf_keeps_everything_else(made, tmp_path):
    artifact = made(head_dim=32)
    base = base_for(artifact, tmp_path)
    done = exported("llama.cpp", artifact, tmp_path, base=base)
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
    assert after.fields["rotationzoo.artifact"].contents() == artifact.identity
    assert any("cancels the calibrated one" in note for note in done.launch.notes)
    assert done.launch.environment == {
        "LLAMA_KV_NO_HADAMARD": "1",
        "LLAMA_ATTN_ROT_DISABLE": "1",
        "LLAMA_KV_CLIP_RATIO": "0.96",
        "LLAMA_KV_HP_SINK": "8",
        "LLAMA_KV_HP_RECENT": "16",
    }
    base = next(done.path.glob("*.gguf"))
    said = refused(exported, "llama.cpp", artifact, tmp_path / "again", base=base)
    assert "has rotations already" in said


def test_bases_that_do_not_fit(made, tmp_path):
    artifact = made(head_dim=32)
    for shape, reason in (
        (dict(layers=2), "has no keys in layer 2, which has rotations here"),
        (dict(layers=6), "layer 4 caches keys there"),
        (dict(kv_heads=1), "has 32 rows"),
        (dict(architecture="llama"), "of architecture llama"),
        (dict(architecture="qwen3moe"), "neither clips nor keeps tokens exact"),
    ):
        options = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "dim": 32, **shape}
        base = engines.write_base(tmp_path / "wrong.gguf", **options)
        assert reason in refused(exported, "llama.cpp", artifact, tmp_path, base=base)
        refused(exported, "llama.cpp", artifact, tmp_path / "new" / "place", base=base)
        assert not (tmp_path / "new").exists()
    (tmp_path / "none.gguf").write_bytes(b"GGUF or not")
    said = refused(exported, "llama.cpp", artifact, tmp_path, base=tmp_path / "none.gguf")
    assert "is not a valid GGUF file" in said
    with pytest.raises(RotationZooError, match="from the model's own file") as failure:
        exported("llama.cpp", artifact, tmp_path, base=None)
    assert "--base" in failure.value.hint


def test_without_the_package_it_is_named_before_anything_is_read(made, tmp_path, monkeypatch):
    artifact = made(head_dim=32)
    monkeypatch.delitem(sys.modules, "rotationzoo.engines.formats.llama_cpp", raising=False)
    monkeypatch.delattr(formats, "llama_cpp", raising=False)
    monkeypatch.delitem(sys.modules, "rotationzoo.storage.gguf_reader", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RotationZooError, match="gguf is not installed") as failure:
        export(artifact, Request("llama.cpp", tmp_path / "out"))
    assert failure.value.hint == "run: pip install 'gguf>=0.17'"
    assert not (tmp_path / "out").exists()
