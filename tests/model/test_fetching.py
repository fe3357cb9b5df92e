"""Telling how much of a model's weights has arrived."""

import json
import threading

import pytest

from rotationzoo.model import source as model_source
from rotationzoo.model.source import Source
from rotationzoo.progress import Bytes
from rotationzoo.storage import growth

SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def source(tmp_path):
    """A model in the hub's cache, of which another revision is there already."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "earlier").write_bytes(bytes(900))
    index = {"metadata": {"total_size": 1000}, "weight_map": dict(zip("ab", SHARDS, strict=True))}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    return Source("someone/model", snapshot, "abc")


def test_weights_are_told_in_bytes(source, monkeypatch):
    monkeypatch.setattr(growth, "_LOOK", 0.01)
    told, half, more = [], threading.Event(), threading.Event()

    def progress(stage, done, total) -> None:
        told.append((stage, done, total))
        if done == 600:
            half.set()
        if done == 800:
            more.set()

    def fetch(source) -> None:
        blobs = source.folder.parent.parent / "blobs"
        (blobs / "first").write_bytes(bytes(600))
        (source.folder / SHARDS[0]).symlink_to(blobs / "first")
        assert half.wait(30)
        (blobs / "second.incomplete").write_bytes(bytes(200))
        assert more.wait(30)
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


def test_a_failed_download_ends_the_thread(source, monkeypatch):
    def fetch(source) -> None:
        raise ConnectionError

    monkeypatch.setattr(model_source, "fetch", fetch)
    told = []
    with pytest.raises(ConnectionError):
        model_source.fetch_weights(source, lambda *step: told.append(step))
    assert told == [("fetching the weights", 0, 1000)]
    assert not any(thread.name == "growth" for thread in threading.enumerate())
