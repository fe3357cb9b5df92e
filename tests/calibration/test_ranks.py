"""Calibration by two processes, as torchrun starts them: the test stands in for torchrun."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import left_behind, only_error
from support.jobs import SMALL, job, rotation_bytes
from support.ranks import Beside, Launcher, silent

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate, contribute, read_calibration_text
from rotationzoo.calibration.plan import plan
from rotationzoo.calibration.record import identify_job
from rotationzoo.cli import app
from rotationzoo.errors import RotationZooError
from rotationzoo.ranks import joined
from rotationzoo.recipe import PRESETS

WORDS = ["--tokens", "2048", "--length", "256", "--batch", "2", "--output", "out"]
ROUNDING = 1e-12  # measured 2e-16


@pytest.fixture
def beside(monkeypatch) -> Beside:
    return Beside(monkeypatch, rank=1)


def check_equal(folder, artifact) -> None:
    """The statistics in a folder are those of an artifact, up to rounding."""
    tensors, expected = load_file(folder / "statistics.safetensors"), artifact.statistics_tensors()
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        wanted = expected[name]
        if tensor.dtype == torch.int64:
            assert torch.equal(tensor, wanted)
        else:
            assert (tensor - wanted).norm() <= ROUNDING * wanted.norm(), name


def test_three_processes_give_what_one_does(launcher, tiny, tmp_path):
    """Two passes over two batches, so that the third process has none."""
    recipe = PRESETS["oscar-v1"].model_copy(update={"data": SMALL})
    alone = calibrate(job(tiny, tmp_path, recipe, batch=4))
    words = ["calibrate", tiny, *WORDS, "--recipe", "oscar-v1", "--batch", "4", "--quiet"]
    first, *others = launcher.start(*words, ranks=range(3), world=3).ended()
    assert (first.returncode, first.stdout.strip()) == (0, "out"), first.stderr
    assert "1 of 3 processes had nothing to do: --batch 3 would give each" in first.stderr
    for other in others:
        silent(other, 0)
    assert {path.split("/")[0] for path in left_behind(launcher.command)} == {"out"}
    check_equal(launcher.command.folder / "out", alone)


@pytest.mark.thorough
def test_two_machines_give_the_bytes_of_one_process(command, tiny, tmp_path):
    """Two of torch's launchers, which meet at an address, each with one process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    words += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    calibration = ["-m", "rotationzoo", "calibrate", str(tiny), *WORDS, "--quiet"]
    machines = []
    for number in range(2):
        machine = subprocess.Popen(
            [*words, "--node-rank", str(number), *calibration],
            cwd=command.folder,
            env=command.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        machines.append(machine)
    recipe = PRESETS["oscar"].model_copy(update={"data": SMALL})
    alone = calibrate(job(tiny, tmp_path, recipe, batch=2))
    ended = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ended
    assert [stdout for stdout, _ in ended] == ["out\n", ""]
    shared = Artifact.open(command.folder / "out")
    assert shared.manifest.identity["processes"] == "2"
    assert rotation_bytes(shared) == rotation_bytes(alone)


def test_a_killed_process_ends_all_and_the_next_run_goes_on(launcher, tiny, tmp_path):
    words = ["calibrate", tiny, *WORDS, "--recipe", "oscar"]
    launcher.start(*words)
    process = launcher.process_id(1)
    os.kill(process, signal.SIGSTOP)  # so that it is not done before the other has saved its sums
    until = time.monotonic() + 30
    while "out.checkpoint.safetensors" not in left_behind(launcher.command):
        assert time.monotonic() < until, "nothing was saved"
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    first, _ = launcher.ended()
    assert "a process of this command is gone" in only_error(first)
    assert left_behind(launcher.command) == ["out.checkpoint.safetensors"]
    first, second = Launcher(launcher.command).start(*words).ended()
    assert first.returncode == 0, first.stderr
    silent(second, 0)
    assert {path.split("/")[0] for path in left_behind(launcher.command)} == {"out"}
    recipe = PRESETS["oscar"].model_copy(update={"data": SMALL})
    check_equal(launcher.command.folder / "out", calibrate(job(tiny, tmp_path, recipe, batch=2)))


def test_a_signal_ends_all(launcher, tiny):
    """torchrun hands on Ctrl-C and the end of a scheduler's job; one process is enough."""
    launcher.start("calibrate", tiny, *WORDS)
    launcher.process_id(0)
    os.kill(launcher.process_id(1), signal.SIGTERM)
    first, second = launcher.ended()
    assert "interrupted" in only_error(first, 130)
    silent(second, 130)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["generate", "demo"], "only calibrate and evaluate can be shared"),
        (["evaluate", "demo", "--device-map", "auto"], "--device-map spreads one model"),
        (["calibrate", "demo", "--device-map", "auto"], "--device-map spreads one model"),
    ],
)
def test_what_cannot_be_shared_is_refused(words, problem, inside, monkeypatch):
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in {**told, "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, str(value))
    assert problem in only_error(inside(*words), 2)


@pytest.mark.parametrize(("rank", "pauses"), [(0, []), (1, [app._HEAD_START])])
def test_process_0_has_time_to_say_what_was_wrong(inside, monkeypatch, rank, pauses):
    """A launcher ends all processes as soon as one has ended, and only process 0 prints."""
    told = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in {**told, "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(app, "_close_output", lambda: None)
    waited = []
    monkeypatch.setattr(app.time, "sleep", waited.append)
    assert inside("generate", "demo").returncode == 2
    assert waited == pauses


def test_a_process_does_not_add_sums_of_another_job(beside, tiny, tmp_path):
    """Here the test is process 0, and has read other text."""
    wanted = job(tiny, tmp_path, batch=2)
    planned = plan(wanted)
    identity = identify_job(wanted, planned.source, read_calibration_text(planned))
    beside.tell("begin", True)
    beside.tell("job", identity | {"text": "of a different file"})
    with (
        pytest.raises(RotationZooError, match="process 1 would add sums of another job: text diff"),
        joined(lambda: "cpu"),
    ):
        contribute(wanted)
    assert beside.store.get("ended/1").startswith(b'["RotationZooError", "process 1 would')
    assert not list(tmp_path.iterdir())
