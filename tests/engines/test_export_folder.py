"""The folder of an export: whole, for servers to read, and never in the place of other work."""

import fcntl
import json
import logging
import threading

import pytest
from support.engine_artifacts import OSCAR, WRITTEN, exported

from rotationzoo.engines.formats.oscar_pt import markers
from rotationzoo.errors import RotationZooError
from rotationzoo.storage.files import sha256


def test_a_record_of_unknown_origin_removes_nothing_elsewhere(made, tmp_path):
    artifact = made(head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("")
    for content in ({"files": {"../victim": "", str(victim): ""}}, [1], {"files": 3}):
        (done.path / "export.json").write_text(json.dumps(content))
        exported("sglang", artifact, tmp_path)
        assert victim.exists()


@pytest.mark.parametrize("engine", WRITTEN)
def test_servers_that_run_as_somebody_else_can_read_the_files(engine, made, tmp_path):
    """safetensors makes files for their owner alone."""
    done = exported(engine, made(head_dim=32), tmp_path)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in done.path.iterdir()}
    assert modes == dict.fromkeys((*done.files, "export.json"), "0o644")


def test_a_pair_is_replaced_alone_and_never_half(made, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_OSCAR_CALIBRATION_LOCK_DIR", str(tmp_path / "locks"))
    artifact = made(head_dim=32)
    other = made(recipe=OSCAR.model_copy(update={"value_statistic": "value"}), head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    assert not list(done.path.glob(".oscar*")), "a new folder appears whole"
    exported("sglang", other, tmp_path)
    assert not list(done.path.glob(".oscar*")), "and takes the place of another whole"
    (lock,) = (tmp_path / "locks").iterdir()
    assert lock.stem == f"oscar_{markers(*(done.path / name for name in sorted(done.files)))[0]}"

    monkeypatch.setattr(
        logging.getLogger("rotationzoo"), "propagate", True
    )  # which a command before this may have ended
    monkeypatch.setattr("rotationzoo.storage.locks._SILENCE", 0.1)
    server = lock.open("a+")  # that loads a pair
    fcntl.flock(server, fcntl.LOCK_SH)
    threading.Timer(1.5, server.close).start()
    exported("sglang", artifact, tmp_path)
    assert server.closed, "it waits for the server that reads the pair"
    assert "that is reading or writing" in caplog.text, "and says so"

    monkeypatch.setattr("rotationzoo.storage.locks.WAIT", 0.2)
    with lock.open("a+") as server:
        fcntl.flock(server, fcntl.LOCK_SH)
        with pytest.raises(RotationZooError, match=r"\(an SGLang server\); gave up after 0.2 s"):
            exported("sglang", other, tmp_path)
    whole = exported("sglang", artifact, tmp_path)
    assert {name: sha256(done.path / name) for name in whole.files} == whole.files
