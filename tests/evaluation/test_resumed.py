"""Saved answers: an evaluation only reads those that this user's own command wrote."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.tasks.resumed import SavedAnswers
from rotationzoo.recall.prompts import Answers, Prompt, Question

IDS = torch.arange(6)
ASKED = Question("needles", slice(2, 3), 0), Question("needles", slice(4, 6), 1)
PROMPTS = [Prompt(IDS, ASKED)]
JOB = "a job"


def answers() -> Answers:
    return Answers(torch.tensor([True, False]), torch.tensor([-0.5, -2.0], dtype=torch.float64))


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """The file of an evaluation that was stopped."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "mine.answers.safetensors"
    saved = SavedAnswers(path, JOB)
    saved.save("mine", PROMPTS, answers())
    saved.save("hadamard", PROMPTS, answers())
    return path


def test_answers_are_found_again_for_their_own_job(path):
    again = SavedAnswers(path, JOB)
    for name in ("mine", "hadamard"):
        found = again.find(name, PROMPTS)
        assert torch.equal(found.correct, answers().correct)
        assert torch.equal(found.log_probability, answers().log_probability)
    assert again.notes == []
    assert again.find("another", PROMPTS) is None
    assert SavedAnswers(path, "another job").find("mine", PROMPTS) is None
    again.remove()
    assert not path.exists()
    assert list((path.parent / "state").rglob("?" * 64)) == []


def all_right(data: bytes) -> bytes:
    return save({name: torch.ones_like(tensor) for name, tensor in load(data).items()})


CHANGES = {
    "all right": all_right,
    "empty": lambda _: b"",
    "cut off": lambda data: data[:-1],
    "no tensors": lambda _: bytes(100),
}


@pytest.mark.hostile("values")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_answers_that_were_changed_are_set_aside(path, change):
    path.write_bytes(changed := change(path.read_bytes()))
    again = SavedAnswers(path, JOB)
    assert again.find("mine", PROMPTS) is None
    aside = path.with_name("mine.answers.safetensors.old")
    (note,) = again.notes
    assert str(path) in note
    assert aside.name in note
    assert (aside.read_bytes(), path.exists()) == (changed, False)


@pytest.mark.hostile("values")
def test_answers_that_somebody_else_wrote_decide_nothing(path, tmp_path, monkeypatch):
    """A clone may hold the answers of this very job, artifact and model."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of-another-user"))
    again = SavedAnswers(path, JOB)
    assert again.find("mine", PROMPTS) is None
    assert "was not written here" in again.notes[0]


@pytest.mark.hostile("size")
def test_a_terabyte_of_answers_is_not_read(path):
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert len(SavedAnswers(path, JOB).notes) == 1


@pytest.mark.hostile("link")
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_a_pipe_and_a_link_are_refused(path, make):
    path.unlink()
    make(path)
    with pytest.raises(RotationZooError, match="is a symbolic link, a folder, a pipe"):
        SavedAnswers(path, JOB)
