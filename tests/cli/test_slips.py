"""Slips that everybody makes once: a mistyped name, a place that cannot be written, Ctrl-C."""

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


def test_an_artifact_in_the_models_place(inside, artifact):
    says = only_error(inside("evaluate", artifact, "demo"), 2)
    assert f"{artifact} has rotations, and the model comes before" in says
    assert says.endswith(f"Hint: give them as: rotationzoo evaluate demo {artifact}\n")


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
