"""The folder of an export: whole, for servers to read, and never in the place of other work."""

import pytest
from support.engine_artifacts import OSCAR, WRITTEN, exported

from rotationzoo.storage.files import sha256


@pytest.mark.parametrize("engine", WRITTEN)
def test_servers_that_run_as_somebody_else_can_read_the_files(engine, made, tmp_path):
    """safetensors makes files for their owner alone."""
    done = exported(engine, made(head_dim=32), tmp_path)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in done.path.iterdir()}
    assert modes == dict.fromkeys((*done.files, "export.json"), "0o644")


def test_a_pair_is_replaced_whole(made, tmp_path):
    artifact = made(head_dim=32)
    other = made(recipe=OSCAR.model_copy(update={"value_statistic": "value"}), head_dim=32)
    done = exported("sglang", artifact, tmp_path)
    (done.path / ".oscar_0123456789abcdef.complete.json").write_text("{}")
    exported("sglang", other, tmp_path)
    assert not list(done.path.glob(".oscar*")), "what marked the earlier pair is gone with it"
    whole = exported("sglang", artifact, tmp_path)
    assert {name: sha256(done.path / name) for name in whole.files} == whole.files
