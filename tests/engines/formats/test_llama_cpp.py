"""Rotations in a copy of a GGUF file: which base they are copied into, and hostile bases."""

import contextlib
import struct
import sys

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import engine_readers as engines
from support.engine_artifacts import base_for, exported, layers_of, matrices, rows_of
from support.oscar_files import gguf_bytes, gguf_field, gguf_tensor, refused

from rotationzoo.artifact.reductions import Request
from rotationzoo.engines import formats
from rotationzoo.engines.export import export
from rotationzoo.errors import RotationZooError
from rotationzoo.storage.gguf_reader import open_gguf


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
            assert "loads one head dimension" in refused(export, artifact, request)
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
        (dict(layers=2), "has no keys in layer 2, which has rotations in the artifact"),
        (dict(layers=6), "layer 4 caches keys, and has no rotation"),
        (dict(kv_heads=1), "has 32 rows"),
        (dict(architecture="llama"), "of architecture llama"),
        (dict(architecture="qwen3moe"), "neither clips nor keeps tokens exact"),
    ):
        options = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "dim": 32, **shape}
        base = engines.write_base(tmp_path / "wrong.gguf", **options)
        assert reason in refused(exported, "llama.cpp", artifact, tmp_path, base=base)
        refused(exported, "llama.cpp", artifact, tmp_path / "new" / "place", base=base)
        assert not (tmp_path / "new").exists()
    base.write_bytes(b"GGUF or not")
    said = refused(exported, "llama.cpp", artifact, tmp_path, base=base)
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


# ---- bases that are damaged or mean harm


def with_field(kind: int, value: bytes, name: bytes = b"a") -> bytes:
    return gguf_bytes(fields=1, body=gguf_field(name, kind, value))


ALIGNMENT = b"general.alignment"
ASKS_TOO_MUCH = {
    "tensor": gguf_bytes(tensors=1, body=gguf_tensor(b"blk.0.attn_k_rot.weight", (2**30, 2**30))),
    "tensor that overflows": gguf_bytes(tensors=1, body=gguf_tensor(b"t", (2**32, 2**32))),
    "tensor far away": gguf_bytes(tensors=1, body=gguf_tensor(b"t", (1,), offset=2**62)),
    "tensors": gguf_bytes(tensors=2**60),
    "fields": gguf_bytes(fields=2**60),
    "text": with_field(8, struct.pack("<Q", 2**60)),
    "name": gguf_bytes(fields=1, body=struct.pack("<Q", 2**60)),
    "list": with_field(9, struct.pack("<IQ", 4, 2**60)),
    "list of texts": with_field(9, struct.pack("<IQ", 8, 2**60)),
    "list of lists": with_field(9, struct.pack("<IQ", 9, 2**10) + bytes(2**14)),
    "long list": with_field(9, struct.pack("<IQ", 0, 5_000_000) + bytes(5_000_000)),
    "dimensions": gguf_bytes(tensors=1, body=struct.pack("<QI", 0, 2**32 - 1)),
    "type": gguf_bytes(tensors=1, body=gguf_tensor(b"t", (32,), kind=4242)),
    "type of a field": with_field(77, b""),
    "alignment": with_field(4, struct.pack("<I", 0), ALIGNMENT),
    "alignment of no power of two": with_field(4, struct.pack("<I", 24), ALIGNMENT),
    "version": gguf_bytes(version=77),
    "bytes of other machines": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}


@pytest.mark.hostile("size")
@pytest.mark.parametrize("name", ASKS_TOO_MUCH)
def test_a_gguf_that_asks_for_more_than_it_has(tmp_path, name):
    (tmp_path / "x.gguf").write_bytes(ASKS_TOO_MUCH[name] + bytes(512))
    assert "is not a valid GGUF file" in refused(open_gguf, tmp_path / "x.gguf")


def test_one_part_of_a_model_is_refused(tmp_path):
    part = with_field(2, struct.pack("<H", 4), b"split.count")
    (tmp_path / "x.gguf").write_bytes(part + bytes(512))
    assert "is one part of several" in refused(open_gguf, tmp_path / "x.gguf")


@pytest.mark.hostile("malformed")
@given(data=st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_base_with_bytes_changed(tmp_path, made, data):
    """It is exported with, or refused with a sentence."""
    artifact = made(head_dim=32)
    content = bytearray(base_for(artifact, tmp_path).read_bytes())
    header = bytes(content).rindex(b"blk.3.ffn_down.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    (tmp_path / "changed.gguf").write_bytes(content)
    with contextlib.suppress(RotationZooError):
        exported("llama.cpp", artifact, tmp_path, base=tmp_path / "changed.gguf")


ARCHITECTURE = b"general.architecture"
ODD_BASES = {
    "a list for an architecture": with_field(9, struct.pack("<IQI", 4, 1, 3), ARCHITECTURE),
    "a number for an architecture": with_field(4, struct.pack("<I", 3), ARCHITECTURE),
    "no text": with_field(8, struct.pack("<Q", 2) + b"\xff\xfe", ARCHITECTURE),
}


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("name", ODD_BASES)
def test_a_base_of_no_architecture(tmp_path, made, name):
    (tmp_path / "x.gguf").write_bytes(ODD_BASES[name] + bytes(512))
    base, artifact = tmp_path / "x.gguf", made(head_dim=32)
    words = refused(exported, "llama.cpp", artifact, tmp_path, base=base)
    assert "is of architecture unknown" in words


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("cut", [8, 100, 1000, 5000])
def test_a_base_that_was_cut_off(tmp_path, made, cut):
    artifact = made(head_dim=32)
    base = base_for(artifact, tmp_path)
    base.write_bytes(base.read_bytes()[:-cut])
    assert "is truncated" in refused(exported, "llama.cpp", artifact, tmp_path / "x", base=base)
    assert not (tmp_path / "x" / "out").exists()
