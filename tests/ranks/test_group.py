"""What a process hears of the others: the test stands in for the launcher and for one of them."""

import os

import pytest
import torch
from support.ranks import Beside

from rotationzoo import ranks
from rotationzoo.errors import ProcessLost, RotationZooError, Unsound, UsageError
from rotationzoo.model.placement import free_memory
from rotationzoo.ranks.group import Group


def cpu() -> str:
    return "cpu"


@pytest.fixture
def beside(monkeypatch) -> Beside:
    monkeypatch.setenv("ROTATIONZOO_RANK_TIMEOUT", "0.2")
    return Beside(monkeypatch, rank=0)


def test_an_error_keeps_its_kind_and_its_hint(beside):
    beside.end("Unsound", "layer 2 is not finite", "a hint")
    with pytest.raises(Unsound, match="layer 2 is not finite") as raised, ranks.joined(cpu):
        ranks.beat()
    assert raised.value.hint == "a hint"
    assert ranks.world() == 1, "the group is left"


def test_an_interruption_is_one_here(beside):
    beside.end("interrupted")
    with pytest.raises(KeyboardInterrupt), ranks.joined(cpu):
        ranks.beat()


def test_a_process_that_is_done_may_be_gone(beside):
    beside.end("done")
    with ranks.joined(cpu):
        assert (ranks.rank(), ranks.world(), ranks.share("abcde")) == (0, 2, ["a", "c", "e"])
        ranks.beat()


def test_a_process_that_is_gone_without_a_word_is_lost(beside, ended_process):
    beside.say_hello(ended_process)
    with pytest.raises(RotationZooError, match="is gone"), ranks.joined(cpu):
        ranks.beat()


def test_a_signal_after_a_loss_tells_of_the_loss(beside, ended_process):
    """torchrun sends SIGTERM to all others when one is killed."""
    beside.say_hello(ended_process)
    with pytest.raises(RotationZooError, match="is gone"), ranks.joined(cpu):
        raise KeyboardInterrupt


def test_a_process_that_gives_no_sign_of_life_is_given_up(beside):
    with pytest.raises(RotationZooError, match="no sign of life"), ranks.joined(cpu):
        ranks.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        # NCCL has no type of error for it. These are its words.
        RuntimeError(
            "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 2 'out of memory'"
        ),
    ],
)
def test_full_memory_is_not_taken_for_a_lost_process(beside, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    beside.tell("sum 1/1", True)
    monkeypatch.setattr(Group, "_wait_for_connection", fail)
    with pytest.raises(RotationZooError, match="no memory left") as raised, ranks.joined(cpu):
        ranks.all_reduce(torch.ones(1))
    assert not isinstance(raised.value, ProcessLost)
    assert "--batch" in raised.value.hint


def test_processes_without_a_gpu_are_refused_beside_others(beside):
    beside.say_hello(device="cuda")
    with pytest.raises(UsageError, match="1 of 2 processes have no GPU"), ranks.joined(cpu):
        pytest.fail("the work began")


def test_an_odd_timeout_is_refused(beside, monkeypatch):
    monkeypatch.setenv("ROTATIONZOO_RANK_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="'soon' and not a number"), ranks.joined(cpu):
        pytest.fail("the work began")


@pytest.mark.parametrize(
    ("visible", "local", "used"),
    [(None, 3, "3"), ("4,7", 1, "7"), ("4,7", 2, ""), ("", 0, ""), ("GPU-1a,GPU-2b", 0, "GPU-1a")],
)
def test_a_process_sees_the_gpu_of_its_local_rank(visible, local, used, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    ranks.use_one_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == used


def test_one_process_under_a_launcher_is_alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert ranks.launched_rank() is None
    with ranks.joined(cpu):
        assert ranks.world() == 1


def test_processes_share_the_memory_of_their_machine(monkeypatch):
    whole = free_memory("cpu")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert 0.5 < 8 * free_memory("cpu") / whole < 2  # other programs come and go
