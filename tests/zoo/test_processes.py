"""The commands in processes of their own: as a user runs them, killed, and on a full disk."""

import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
from support.command_line import succeeded
from support.hubs import huggingface, modelscope
from support.hubs.hub import Fault
from support.published import ZOO, hub_environment


@pytest.fixture
def outside(command, program, tmp_path):
    """Both hubs, and the command line in processes of their own."""
    with huggingface.serve() as hf, modelscope.serve() as ms:
        variables = hub_environment(hf, ms, tmp_path)
        yield SimpleNamespace(
            hf=hf,
            ms=ms,
            folder=command.folder,
            run=lambda *words, **options: command(*words, env=variables, **options),
            program=program,
            environment=command.environment | variables,
        )


@pytest.mark.parametrize(
    "words",
    [("push", "{made}", ZOO), ("pull", "demo", "--repo", ZOO, "--local-dir", "here")],
    ids=["push", "pull"],
)
def test_killed_in_the_middle(outside, made, tmp_path, words):
    if words[0] == "pull":
        assert outside.run("push", made, ZOO).returncode == 0
    words = [word.format(made=made) for word in words]
    slow = Fault("PUT" if words[0] == "push" else "GET", "/storage/", 503, 99)
    outside.hf.faults.append(slow)
    told = tmp_path / "process-id"
    process = subprocess.Popen(
        [*outside.program, *words],
        cwd=outside.folder,
        env=outside.environment | {"PROCESS_ID": str(told)},
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while slow.count == 99 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(told.read_text()) if told.exists() else process.pid, signal.SIGKILL)
    process.wait()
    assert slow.count < 99, "it was in the middle"
    assert not (outside.folder / "here").exists()
    outside.hf.faults.clear()
    succeeded(outside.run(*words))
    if words[0] == "pull":
        assert sorted(path.name for path in outside.folder.iterdir()) == ["here"]
    else:
        assert outside.hf.commits(ZOO) == 2


def test_a_full_disk(outside, made):
    import resource

    assert outside.run("push", made, ZOO).returncode == 0
    limited = outside.run(
        "pull", "demo", "--repo", ZOO, "--local-dir", "here",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )  # fmt: skip
    assert limited.returncode == 1, limited.stderr
    assert "Traceback" not in limited.stderr
    assert not (outside.folder / "here").exists()
    assert outside.run("pull", "demo", "--repo", ZOO, "--local-dir", "here").returncode == 0
