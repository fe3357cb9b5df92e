"""GGUF files, as rotations and as bases, that are damaged or mean harm."""

import contextlib
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine_artifacts import base_for, exported
from support.oscar_files import gguf_bytes, gguf_field, gguf_tensor, refused

from rotationzoo.errors import RotationZooError
from rotationzoo.storage.gguf_reader import open_gguf


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
}


@pytest.mark.hostile("size")
@pytest.mark.parametrize("name", ASKS_TOO_MUCH)
def test_a_gguf_that_asks_for_more_than_it_has(tmp_path, name):
    (tmp_path / "x.gguf").write_bytes(ASKS_TOO_MUCH[name] + bytes(512))
    assert "is not a valid GGUF file" in refused(open_gguf, tmp_path / "x.gguf")


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
