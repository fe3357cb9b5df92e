"""Damaged and malicious rotation files: one sentence each, and no more memory than the file's."""

import contextlib
import os
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine_artifacts import exported
from support.engine_readers import write_gguf
from support.oscar_files import KEY, VALUE, deep, entry, refused, torch_file

from rotationzoo.engines.formats.oscar_pt import read_pt
from rotationzoo.engines.import_ import import_
from rotationzoo.errors import RotationZooError
from rotationzoo.settings import Import
from rotationzoo.storage.gguf_reader import open_gguf


@pytest.mark.hostile("size")
@pytest.mark.parametrize("elements", [2**20, 2**33, 2**40, 2**60])
def test_a_tensor_of_stride_zero_is_not_expanded(tmp_path, elements):
    huge = torch.ones(1).expand(elements)
    for name in ("rotation", "eigenvalues", "k_mean"):
        path = torch_file(tmp_path / KEY, {0: entry(**{name: huge})})
        assert path.stat().st_size < 64_000
        assert "ask for" in refused(read_pt, path)


@pytest.mark.hostile("size")
def test_many_layers_that_share_a_matrix_are_not_written_out(tmp_path):
    matrix = torch.eye(256)
    path = torch_file(tmp_path / KEY, {i: entry(layer_id=i, rotation=matrix) for i in range(1023)})
    assert path.stat().st_size < 1 << 20
    assert read_pt(path).content.rotation[1022].shape == (256, 256), "as many as any model has"
    wide = torch.eye(512).expand(64, 512, 512)
    path = torch_file(tmp_path / KEY, {i: entry(layer_id=i, rotation=wide) for i in range(8)})
    assert "ask for" in refused(read_pt, path)


@pytest.mark.hostile("size")
@pytest.mark.parametrize("power", [0, 9, 18, 5000])
def test_layers_that_no_model_has(tmp_path, power):
    layer = 1023 + 10**power
    path = torch_file(tmp_path / KEY, {layer: entry(layer_id=layer)})
    said = refused(read_pt, path)
    assert "and no model has" in said or "is not a rotation file" in said


@pytest.mark.hostile("size")
def test_a_compressed_archive_is_not_unpacked(tmp_path):
    plain = torch_file(tmp_path / "plain.pt", {0: entry(rotation=torch.zeros(4096, 4096))})
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(tmp_path / KEY, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert (tmp_path / KEY).stat().st_size < 1 << 18
    assert "unpacks to" in refused(read_pt, tmp_path / KEY)


PLACES = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.hostile("link")
@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("suffix", [".pt", ".gguf"])
def test_pipes_and_devices_are_not_waited_for(tmp_path, made, make, suffix):
    path = tmp_path / f"k_rotation{suffix}"
    make(path)
    if suffix == ".gguf":
        words = refused(exported, "llama.cpp", made(head_dim=32), tmp_path / "x", base=path)
    else:
        words = refused(import_, Import([path, path], tmp_path / "out", "demo"))
    assert "there is no file" in words or "is not a regular file" in words


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """One good file of each kind, a few kilobytes."""
    folder = tmp_path_factory.mktemp("good")
    own = {"rotation": torch.eye(8), "eigenvalues": torch.arange(8.0)}
    torch_file(folder / KEY, {i: entry(layer_id=i, **own) for i in range(2)})
    writer = gguf.GGUFWriter(folder / "x.gguf", "qwen3")
    writer.add_token_list(["a", "b"])
    writer.add_string("rotationzoo.key_objective", "qqt_r_h_pbr")
    for i in range(2):
        for side in "kv":
            writer.add_tensor(f"blk.{i}.attn_{side}_rot.weight", np.eye(8, dtype=np.float32))
    write_gguf(writer)
    return folder


READERS = {KEY: read_pt, "x.gguf": open_gguf}


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("name", READERS)
def test_a_file_cut_off_anywhere(good, tmp_path, name):
    data = (good / name).read_bytes()
    READERS[name](good / name)
    path = tmp_path / name
    # Archives keep their table at the end, the others at the beginning: every length there, and
    # some between.
    lengths = {*range(400), *range(len(data) - 300, len(data)), *range(0, len(data), 97)}
    for length in sorted(n for n in lengths if 0 <= n < len(data)):
        path.write_bytes(data[:length])
        try:
            READERS[name](path)
        except RotationZooError:
            continue
        raise AssertionError(f"read as whole at {length} of {len(data)} bytes")


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_file_with_bytes_changed(good, tmp_path, name, data):
    """It is read, or refused with a sentence: nothing else comes out."""
    content = bytearray((good / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / name).write_bytes(content)
    with contextlib.suppress(RotationZooError):
        READERS[name](tmp_path / name)


ODD_LAYERS = {
    "text": {0: {"rotation": "matrix"}},
    "list": [torch.eye(8)],
    "no numbers": {"first": entry()},
    "negative": {-1: entry(layer_id=-1)},
    "float": {0.5: entry()},
    "layer id of a list": {0: entry(layer_id=[0])},
    "layer id of a tensor": {0: entry(layer_id=torch.arange(2))},
    "integers": {0: entry(rotation=torch.eye(8, dtype=torch.int64))},
    "float8": {0: entry(rotation=torch.eye(8).to(torch.float8_e4m3fn))},
    "vector": {0: entry(rotation=torch.ones(8))},
    "no channels": {0: entry(rotation=torch.ones(0, 0))},
    "eigenvalues of a matrix": {0: entry(eigenvalues=torch.eye(64))},
    "mean of three dimensions": {0: entry(k_mean=torch.ones(1, 2, 64))},
    "deep": {0: entry(note=deep(200))},
}


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("name", ODD_LAYERS)
def test_tables_of_other_kinds(tmp_path, name):
    layers = ODD_LAYERS[name]
    keys = torch_file(tmp_path / KEY, layers)
    values = torch_file(tmp_path / VALUE, layers, objective="sst_r_h_pbr")
    refused(import_, Import([keys, values], tmp_path / "out", "demo"))
    assert not (tmp_path / "out").exists()
