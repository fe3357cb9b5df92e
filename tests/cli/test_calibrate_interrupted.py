"""A calibration that is stopped, and goes on where it was."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.command_line import left_behind, succeeded, without_stages
from typer.testing import CliRunner

from rotationzoo.cli.app import app

WORDS = ["--tokens", "8192", "--length", "512", "--batch", "1", "--output"]


def start_calibration(command, *words) -> subprocess.Popen:
    return subprocess.Popen(
        [*command.program, "calibrate", "demo", *words],
        cwd=command.folder,
        env={**command.environment, "PROCESS_ID": str(command.folder.parent / "process-id")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background of a shell ignores Ctrl-C, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The artifact of a calibration that nobody stops."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    done = CliRunner().invoke(app, ["calibrate", "demo", *WORDS, str(folder)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_stopped_half_way_and_run_again(command, inside, whole, how):
    words = [*WORDS, "out"]
    running = start_calibration(command, *words)
    checkpoint = command.folder / "out.checkpoint.safetensors"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    told = command.folder.parent / "process-id"
    os.kill(int(told.read_text()) if told.exists() else running.pid, how)
    _, errors = running.communicate(timeout=60)
    assert "out" not in left_behind(command), "stopped before it was done"
    if how != signal.SIGKILL:
        assert running.returncode == 130, errors
        assert without_stages(errors) == [
            "Error: interrupted; what was done so far is saved",
            f"Hint: go on with: rotationzoo calibrate demo {' '.join(words)}",
        ]
    assert [name for name in left_behind(command) if not name.endswith(".lock")] in (
        ["out.checkpoint.safetensors"],
        ["out.checkpoint.safetensors", "out.checkpoint.safetensors.partial"],
    )
    succeeded(inside("calibrate", "demo", *words))
    assert not [name for name in left_behind(command) if "checkpoint" in name]
    for name in ("rotations.safetensors", "statistics.safetensors"):
        assert (command.folder / "out" / name).read_bytes() == (whole / name).read_bytes()
