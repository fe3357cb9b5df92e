"""Weights on their way: how much of them has arrived, and the scratch folder of those that do not
fit, of processes that were killed, and on a full disk."""

import json
import resource
import tempfile
import threading
from pathlib import Path

import pytest
from support.models import save_tiny
from support.quantized import quantize_to_fp8

from rotationzoo import progress as progress_module
from rotationzoo.model import loading
from rotationzoo.model import source as model_source
from rotationzoo.model.placement import PREFIX
from rotationzoo.model.source import Source
from rotationzoo.progress import Bytes

SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def source(tmp_path):
    """A model in the hub's cache, which already has another revision."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "earlier").write_bytes(bytes(900))
    index = {"metadata": {"total_size": 1000}, "weight_map": dict(zip("ab", SHARDS, strict=True))}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    return Source("someone/model", snapshot, "abc")


def test_fetched_weights_are_reported_in_bytes(source, monkeypatch):
    monkeypatch.setattr(progress_module, "LOOK", 0.01)
    told, seen = [], {600: threading.Event(), 800: threading.Event()}

    def progress(stage, done, total) -> None:
        told.append((stage, done, total))
        if done in seen:
            seen[done].set()

    def fetch(source) -> None:
        blobs = source.folder.parent.parent / "blobs"
        (blobs / "first").write_bytes(bytes(600))
        (source.folder / SHARDS[0]).symlink_to(blobs / "first")
        assert seen[600].wait(30)
        (blobs / "second.incomplete").write_bytes(bytes(200))
        assert seen[800].wait(30)
        (blobs / "second.incomplete").rename(blobs / "second")
        (blobs / "second").write_bytes(bytes(400))
        (source.folder / SHARDS[1]).symlink_to(blobs / "second")

    monkeypatch.setattr(model_source, "fetch", fetch)
    model_source.fetch_weights(source, progress)
    assert told[0] == ("fetching the weights", 0, 1000)
    assert told[-1] == ("fetching the weights", 1000, 1000)
    assert all(type(count) is Bytes for step in told for count in step[1:])
    told.clear()
    monkeypatch.setattr(model_source, "fetch", lambda source: None)
    model_source.fetch_weights(source, progress)
    assert told == [("fetching the weights", 0, 0)], "they are here"


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    """A folder for the temporary files of this test alone."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_a_full_disk_is_one_error_sentence(tmp_path, scratch, inside, monkeypatch):
    """What is dequantized has to be written before it can be read from the disk. The limit on the
    size of files stands in for a full disk: the kernel refuses the same write."""
    model = save_tiny(tmp_path / "model", num_hidden_layers=4, hidden_size=128, head_dim=32)
    quantize_to_fp8(model)
    load, limits = loading.load, resource.getrlimit(resource.RLIMIT_FSIZE)

    def load_on_a_full_disk(*arguments, **options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            return load(*arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(loading, "load", load_on_a_full_disk)
    words = "--tokens 2048 --length 256 --output out --device-map auto --max-memory cpu=150KB"
    ended = inside("calibrate", model, *words.split(), "--device", "cpu")
    assert ended.returncode == 1
    error, hint = ended.stderr.strip().splitlines()[-2:]
    assert error.startswith(f"Error: the disk of {scratch / PREFIX}")
    assert error.endswith(" is full, and not all weights fit memory")
    assert hint == "Hint: make room, or name a folder on a larger disk: export TMPDIR=FOLDER"
    assert not list(scratch.glob(f"{PREFIX}*"))
    assert not (inside.folder / "out").exists()
