"""Slips that everybody makes once: a mistyped name, a place that cannot be written, Ctrl-C."""

import errno
import os

import pytest
from support.command_line import only_error

from rotationzoo.storage import locks
from rotationzoo.words import counted


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("calibrat demo", "Did you mean 'calibrate'"),
        ("evaluate demo --tasks needle", "'needle' (did you mean 'needles'?)"),
        ("evaluate demo --format sglan", "(did you mean 'sglang'?)"),
        ("export x --to lama.cpp", "(did you mean 'llama.cpp'?)"),
        ("list --from hugginface", "(did you mean 'huggingface'?)"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest(inside, words, meant):
    result = inside(*words.split())
    assert result.returncode in (1, 2)
    assert meant in result.stderr.splitlines()[0]


@pytest.mark.parametrize(
    "words",
    [
        "export ROTATIONS --to sglang -o PLACE",
        "export ROTATIONS --absorb no-such-model -o PLACE",
        "import no-such-file -o PLACE",
        "calibrate demo --recipe hadamard -o PLACE",
    ],
)
@pytest.mark.parametrize("place", ["/proc/here", "/proc/no/such"])
def test_a_place_that_cannot_be_written_is_refused_at_once(
    inside, artifact, monkeypatch, words, place
):
    """Not after a wait for another process that might be writing there."""
    monkeypatch.setattr(locks, "WAIT", 2.0)
    words = [{"ROTATIONS": artifact, "PLACE": place}.get(word, word) for word in words.split()]
    says = only_error(inside(*words))
    assert says.startswith(f"Error: {place} cannot be written: ")


@pytest.mark.parametrize(
    ("number", "helps"),
    [
        (errno.ENOSPC, "make room, or "),
        (errno.EROFS, "mount it for writing, or "),
        (errno.EACCES, "check who may read and write there, or "),
        (errno.EPERM, "check who may read and write there, or "),
        (errno.EIO, ""),
    ],
)
def test_only_a_full_disk_is_called_full(inside, monkeypatch, number, helps):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks, "_open", refuse)
    says = only_error(inside("calibrate", "demo", "--recipe", "hadamard", "-o", "out"))
    error = f"Error: out cannot be written: {os.strerror(number)}\n"
    assert says == f"{error}Hint: {helps}choose another place with --output\n"


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("MADE demo", "demo MADE"),
        ("MADE owner/model --for vllm", "owner/model MADE --for vllm"),
        ("MADE/ ./some-model/ --save", "some-model MADE/ --save"),
        ("MADE MADE/ demo", "demo MADE MADE"),
        ("MADE --save", "MODEL MADE --save"),
    ],
)
def test_an_artifact_in_the_models_place(inside, artifact, words, right):
    words, right = (text.replace("MADE", str(artifact)) for text in (words, right))
    says = only_error(inside("evaluate", *words.split()), 2)
    assert " has rotations, and the model comes before them\n" in says
    assert says.endswith(f"Hint: give them as: rotationzoo evaluate {right}\n")


@pytest.mark.parametrize("command", ["calibrate", "plan", "evaluate", "serve"])
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("./my-modle", " (did you mean './my-model'?)"),
        ("FOLDER/my-modle/", " (did you mean 'FOLDER/my-model'?)"),
        ("~/my-modle", " (did you mean '~/my-model'?)"),
        ("./another", ""),
    ],
)
def test_a_mistyped_folder_of_a_model(inside, monkeypatch, command, typed, meant):
    monkeypatch.setenv("HOME", str(inside.folder))
    (inside.folder / "my-model").mkdir()
    typed, meant = (text.replace("FOLDER", str(inside.folder)) for text in (typed, meant))
    says = only_error(inside(command, typed))
    assert says.startswith(f"Error: there is no folder {typed}{meant}\n")


def test_a_name_that_nobody_published(inside):
    listed = inside("list", "no-such-model", "--index", "bundled")
    assert listed.stdout.startswith("No published rotations match")


def test_one_is_not_many(inside, tiny):
    assert counted(1, "prompt") == "1 prompt"
    assert [counted(0, "text"), counted(1024, "token")] == ["0 texts", "1,024 tokens"]
    assert "1 token cannot fill" in only_error(inside("calibrate", tiny, "--tokens", "1"))


def test_a_model_before_an_artifact_is_told_from_a_slip(inside, made):
    refused = inside("report", "demo", made)
    assert refused.returncode == 2
    assert "report takes the rotations alone" in refused.stderr
    refused = inside("export", made, "--engine", "vllm")
    assert "did you mean '--for'?" in refused.stderr
